-- Recurring messages. The schema file explains the columns.
ALTER TABLE messages ADD COLUMN schedule_id TEXT;
ALTER TABLE messages ADD COLUMN every TEXT;
ALTER TABLE messages ADD COLUMN missed INTEGER NOT NULL DEFAULT 0;
CREATE INDEX messages_schedule ON messages (schedule_id) WHERE schedule_id IS NOT NULL;
CREATE TABLE schedules (
    id          TEXT PRIMARY KEY,
    sender      TEXT NOT NULL,
    recipient   TEXT NOT NULL REFERENCES agents (id),
    payload     TEXT NOT NULL,
    every       TEXT NOT NULL,
    state       TEXT NOT NULL CHECK (state = 'active' OR state = 'paused' OR state = 'ended'),
    created_at  INTEGER NOT NULL,
    cause       TEXT,
    message_id  TEXT NOT NULL,
    due_at      INTEGER NOT NULL,
    previous_id TEXT
) STRICT, WITHOUT ROWID;

CREATE INDEX schedules_sender ON schedules (sender) WHERE state <> 'ended';
-- The check for interruptions looks for the person's first waiting message.
CREATE INDEX messages_from_person ON messages (recipient, in_seq) WHERE NOT sender <> 'user' AND state = 'pending';
-- Files of tool results that models are shown. The schema file explains the columns.
ALTER TABLE history ADD COLUMN attachments TEXT;
ALTER TABLE calls ADD COLUMN attachments TEXT;
