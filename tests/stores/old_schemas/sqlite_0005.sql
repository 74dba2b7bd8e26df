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

-- What an agent is working on.
ALTER TABLE agents ADD COLUMN turn_no INTEGER NOT NULL DEFAULT 0;
ALTER TABLE agents ADD COLUMN next_hist_seq INTEGER NOT NULL DEFAULT 1;
ALTER TABLE agents ADD COLUMN rounds INTEGER NOT NULL DEFAULT 0;
ALTER TABLE agents ADD COLUMN withdrawals INTEGER NOT NULL DEFAULT 0;
ALTER TABLE agents ADD COLUMN retries INTEGER NOT NULL DEFAULT 0;
ALTER TABLE agents ADD COLUMN why TEXT;
-- The person wants it to rest: it ends its turn and begins no other.
ALTER TABLE agents ADD COLUMN hold INTEGER NOT NULL DEFAULT 0;
-- Who it is, when nobody wrote that into a file: made at run time by another agent, or by a program.
ALTER TABLE agents ADD COLUMN profile TEXT NOT NULL DEFAULT '';
ALTER TABLE agents ADD COLUMN parent TEXT;
-- Who works on it, and how often that ended in a crash at the same step.
ALTER TABLE agents ADD COLUMN worker TEXT;
ALTER TABLE agents ADD COLUMN crash_step INTEGER NOT NULL DEFAULT 0;
ALTER TABLE agents ADD COLUMN crashes INTEGER NOT NULL DEFAULT 0;

-- Sent as the answer at the end of a turn; it is never answered in the same way.
ALTER TABLE messages ADD COLUMN automatic INTEGER NOT NULL DEFAULT 0;
-- The plan whose call sent it: "turn/step" of the sender.
ALTER TABLE messages ADD COLUMN plan TEXT;
CREATE INDEX messages_plan ON messages (sender, plan) WHERE plan IS NOT NULL;

-- Append-only, in closed groups: an assistant's message with calls is followed by exactly their results.
CREATE TABLE history (
    agent_id   TEXT NOT NULL REFERENCES agents (id),
    seq        INTEGER NOT NULL,
    turn_no    INTEGER NOT NULL,
    role       TEXT NOT NULL CHECK (role = 'user' OR role = 'assistant' OR role = 'tool'),
    -- A user row is the message it stands for.
    message_id TEXT,
    content    TEXT,
    calls      TEXT,
    call_id    TEXT,
    hidden     INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (agent_id, seq)
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX history_message ON history (message_id) WHERE message_id IS NOT NULL;
-- With all that is asked of it inside: otherwise SQLite reads the whole history of the agent for every answer.
CREATE INDEX history_turn ON history (agent_id, turn_no, seq, message_id) WHERE message_id IS NOT NULL;

CREATE TABLE plans (
    seq            INTEGER PRIMARY KEY AUTOINCREMENT,
    agent_id       TEXT NOT NULL REFERENCES agents (id),
    turn_no        INTEGER NOT NULL,
    step_no        INTEGER NOT NULL,
    text           TEXT NOT NULL,
    outcome        TEXT NOT NULL CHECK (outcome = 'open' OR outcome = 'closed' OR outcome = 'withdrawn'),
    -- The message that withdrew it, or cut it short.
    interrupted_by TEXT,
    at             INTEGER NOT NULL,
    UNIQUE (agent_id, turn_no, step_no)
) STRICT;

CREATE UNIQUE INDEX plans_open ON plans (agent_id) WHERE outcome = 'open';

CREATE TABLE calls (
    agent_id   TEXT NOT NULL,
    turn_no    INTEGER NOT NULL,
    step_no    INTEGER NOT NULL,
    idx        INTEGER NOT NULL,
    call_id    TEXT NOT NULL,
    name       TEXT NOT NULL,
    arguments  TEXT NOT NULL,
    raw        TEXT,
    effect     TEXT NOT NULL CHECK (effect = 'unsafe' OR effect = 'pure' OR effect = 'idempotent'),
    gated      INTEGER NOT NULL,
    state      TEXT NOT NULL CHECK (
                      state = 'started' OR state = 'done' OR state = 'planned' OR state = 'gated'
                      OR state = 'failed' OR state = 'cancelled' OR state = 'unknown'),
    result     TEXT NOT NULL DEFAULT '',
    started_at INTEGER,
    ended_at   INTEGER,
    PRIMARY KEY (agent_id, turn_no, step_no, idx),
    FOREIGN KEY (agent_id, turn_no, step_no) REFERENCES plans (agent_id, turn_no, step_no)
) STRICT, WITHOUT ROWID;

CREATE INDEX artifacts_created ON artifacts (created_at);

CREATE TABLE roles (
    name    TEXT PRIMARY KEY,
    profile TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- What every answer of a model cost.
CREATE TABLE llm_calls (
    agent_id      TEXT NOT NULL,
    turn_no       INTEGER NOT NULL,
    step_no       INTEGER NOT NULL,
    service       TEXT NOT NULL,
    input_tokens  INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    outcome       TEXT NOT NULL CHECK (outcome IN ('used', 'withdrawn')),
    at            INTEGER NOT NULL,
    PRIMARY KEY (agent_id, turn_no, step_no)
) STRICT, WITHOUT ROWID;

CREATE INDEX llm_calls_at ON llm_calls (at);

-- The older part of a long history, in a few words; the rows themselves stay.
CREATE TABLE summaries (
    agent_id TEXT NOT NULL REFERENCES agents (id),
    upto     INTEGER NOT NULL,
    text     TEXT NOT NULL,
    at       INTEGER NOT NULL,
    PRIMARY KEY (agent_id, upto)
) STRICT, WITHOUT ROWID;

-- The person's conversation that it belongs to: the id of the agent they talk with.
ALTER TABLE messages ADD COLUMN thread TEXT;
-- It offers the person quick replies; answered once a message of theirs says so.
ALTER TABLE messages ADD COLUMN question INTEGER NOT NULL DEFAULT 0;
ALTER TABLE messages ADD COLUMN answered_by TEXT;
ALTER TABLE messages ADD COLUMN answered_option INTEGER;

-- By delivery and not by sending: what was delayed stands where the person met it.
CREATE INDEX messages_thread ON messages (thread, delivered_at, seq) WHERE thread IS NOT NULL;
CREATE INDEX messages_open_questions ON messages (sender, seq) WHERE question = 1 AND answered_by IS NULL;
CREATE INDEX messages_answers ON messages (answered_by) WHERE answered_by IS NOT NULL;
-- Not "recipient = 'user'": every query with "recipient = ?" would then be prepared anew for each value.
CREATE INDEX messages_unread ON messages (thread, delivered_at, seq)
    WHERE thread IS NOT NULL AND sender <> 'user' AND state = 'pending';

-- What could not be looked up afterwards, as JSON.
ALTER TABLE events ADD COLUMN data TEXT;

-- When it came into its state.
ALTER TABLE agents ADD COLUMN since INTEGER;
-- What it took up to this place in its mailbox is forgotten: the person cleared their conversation.
ALTER TABLE agents ADD COLUMN cleared_seq INTEGER NOT NULL DEFAULT 0;

-- How often reading it has failed: a message that nobody can read must not keep others from being read.
ALTER TABLE messages ADD COLUMN attempts INTEGER NOT NULL DEFAULT 0;

-- A step may ask a model more than once: 0 is the answer, summaries made for it count from 1.
CREATE TABLE spent (
    agent_id      TEXT NOT NULL,
    turn_no       INTEGER NOT NULL,
    step_no       INTEGER NOT NULL,
    call_no       INTEGER NOT NULL DEFAULT 0,
    service       TEXT NOT NULL,
    input_tokens  INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    outcome       TEXT NOT NULL CHECK (outcome IN ('used', 'withdrawn')),
    at            INTEGER NOT NULL,
    PRIMARY KEY (agent_id, turn_no, step_no, call_no)
) STRICT, WITHOUT ROWID;

INSERT INTO spent (agent_id, turn_no, step_no, service, input_tokens, output_tokens, outcome, at)
SELECT agent_id, turn_no, step_no, service, input_tokens, output_tokens, outcome, at FROM llm_calls;

DROP TABLE llm_calls;
ALTER TABLE spent RENAME TO llm_calls;
CREATE INDEX llm_calls_at ON llm_calls (at);

