-- Recurring messages. The schema file explains the columns.
ALTER TABLE messages ADD COLUMN schedule_id TEXT COLLATE "C";
ALTER TABLE messages ADD COLUMN every TEXT COLLATE "C";
ALTER TABLE messages ADD COLUMN missed INTEGER NOT NULL DEFAULT 0;
CREATE INDEX messages_schedule ON messages (schedule_id) WHERE schedule_id IS NOT NULL;

CREATE TABLE schedules (
    id          TEXT COLLATE "C" PRIMARY KEY,
    sender      TEXT COLLATE "C" NOT NULL,
    recipient   TEXT COLLATE "C" NOT NULL REFERENCES agents (id),
    payload     TEXT COLLATE "C" NOT NULL,
    every       TEXT COLLATE "C" NOT NULL,
    state       TEXT COLLATE "C" NOT NULL CHECK (state IN ('active', 'paused', 'ended')),
    created_at  BIGINT NOT NULL,
    cause       TEXT COLLATE "C",
    message_id  TEXT COLLATE "C" NOT NULL,
    due_at      BIGINT NOT NULL,
    previous_id TEXT COLLATE "C"
);

CREATE INDEX schedules_sender ON schedules (sender) WHERE state <> 'ended';
-- The check for interruptions looks for the person's first waiting message.
CREATE INDEX messages_from_person ON messages (recipient, in_seq) WHERE sender = 'user' AND state = 'pending';
-- Files of tool results that models are shown. The schema file explains the columns.
ALTER TABLE history ADD COLUMN attachments TEXT COLLATE "C";
ALTER TABLE calls ADD COLUMN attachments TEXT COLLATE "C";
