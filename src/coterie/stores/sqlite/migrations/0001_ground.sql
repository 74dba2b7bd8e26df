-- Closed lists say OR and not IN: for a list of three or more SQLite builds a table, in every statement that writes it.
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE agents (
    id            TEXT PRIMARY KEY,
    kind          TEXT NOT NULL CHECK (kind IN ('agent', 'person')),
    name          TEXT NOT NULL,
    state         TEXT NOT NULL DEFAULT 'idle' CHECK (
                      state = 'llm' OR state = 'tools' OR state = 'idle' OR state = 'ready'
                      OR state = 'wait_approval' OR state = 'wait_retry' OR state = 'blocked' OR state = 'paused'
                      OR state = 'terminated'),
    -- All waiting is this one column: the scheduler asks for runnable_at <= now. NULL: until something happens.
    runnable_at   INTEGER,
    -- The fence: a write for this agent counts only with the epoch and step it was decided on.
    epoch         INTEGER NOT NULL DEFAULT 0,
    step_no       INTEGER NOT NULL DEFAULT 0,
    -- Places in the mailbox. A turn takes everything that waits, so what waits is what lies behind taken_seq.
    next_in_seq   INTEGER NOT NULL DEFAULT 1,
    taken_seq     INTEGER NOT NULL DEFAULT 0,
    -- Counters, so that no limit or badge ever needs a COUNT.
    waiting       INTEGER NOT NULL DEFAULT 0,
    waiting_bytes INTEGER NOT NULL DEFAULT 0,
    delayed       INTEGER NOT NULL DEFAULT 0,
    created_at    INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX agents_runnable ON agents (runnable_at) WHERE runnable_at IS NOT NULL;

CREATE TABLE messages (
    seq          INTEGER PRIMARY KEY AUTOINCREMENT,
    id           TEXT NOT NULL UNIQUE,
    sender       TEXT NOT NULL,
    recipient    TEXT NOT NULL REFERENCES agents (id),
    state        TEXT NOT NULL CHECK (
                      state = 'pending' OR state = 'taken' OR state = 'delayed' OR state = 'withdrawn'
                      OR state = 'dead'),
    in_seq       INTEGER,
    created_at   INTEGER NOT NULL,
    deliver_at   INTEGER,
    delivered_at INTEGER,
    taken_at     INTEGER,
    queued       INTEGER NOT NULL DEFAULT 0,
    early        INTEGER NOT NULL DEFAULT 0,
    stopped      INTEGER NOT NULL DEFAULT 0,
    hops         INTEGER NOT NULL DEFAULT 0,
    option       INTEGER,
    in_reply_to  TEXT,
    cause        TEXT,
    replay_of    TEXT,
    reason       TEXT,
    payload      TEXT NOT NULL
) STRICT;

CREATE UNIQUE INDEX messages_mailbox ON messages (recipient, in_seq) WHERE in_seq IS NOT NULL;
CREATE INDEX messages_due ON messages (deliver_at, seq) WHERE state = 'delayed';

CREATE INDEX messages_dead ON messages (seq) WHERE state = 'dead';

CREATE TABLE artifacts (
    ref        TEXT PRIMARY KEY,
    filename   TEXT NOT NULL,
    type       TEXT NOT NULL CHECK (type = 'image' OR type = 'audio' OR type = 'file'),
    mime_type  TEXT NOT NULL,
    size       INTEGER NOT NULL,
    sha256     TEXT NOT NULL,
    created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX artifacts_sha256 ON artifacts (sha256);

-- Which messages carry which artifact: one that no row names is garbage after a day.
CREATE TABLE attachments (
    artifact_ref TEXT NOT NULL REFERENCES artifacts (ref),
    message_seq  INTEGER NOT NULL REFERENCES messages (seq) ON DELETE CASCADE,
    PRIMARY KEY (artifact_ref, message_seq)
) STRICT, WITHOUT ROWID;

CREATE INDEX attachments_message ON attachments (message_seq);

CREATE TABLE events (
    -- Strictly increasing without AUTOINCREMENT, because the newest row is never deleted.
    seq     INTEGER PRIMARY KEY,
    at      INTEGER NOT NULL,
    kind    TEXT NOT NULL,
    subject TEXT NOT NULL
) STRICT;
