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
