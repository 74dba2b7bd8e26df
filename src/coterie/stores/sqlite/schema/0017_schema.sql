-- CHECKs of three or more values use OR instead of IN: SQLite would build a table for the list in every write.
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- The society's secret. Message ids and the marks around messages in requests are hashed with it.
INSERT INTO meta (key, value) VALUES ('secret', lower(hex(randomblob(32))));

CREATE TABLE agents (
    id              TEXT PRIMARY KEY,
    kind            TEXT NOT NULL CHECK (kind IN ('agent', 'person')),
    name            TEXT NOT NULL,
    state           TEXT NOT NULL DEFAULT 'idle' CHECK (
                        state = 'llm' OR state = 'tools' OR state = 'idle' OR state = 'ready'
                        OR state = 'wait_approval' OR state = 'wait_retry' OR state = 'blocked' OR state = 'paused'
                        OR state = 'terminated'),
    -- The scheduler claims agents with runnable_at <= now. NULL: not until an event. PostgreSQL: also the end of a lease.
    runnable_at     INTEGER,
    -- Fencing: a write for this agent is refused unless it was decided at this epoch and step.
    epoch           INTEGER NOT NULL DEFAULT 0,
    step_no         INTEGER NOT NULL DEFAULT 0,
    -- Positions in the mailbox. Messages are taken in order, so those after taken_seq wait.
    next_in_seq     INTEGER NOT NULL DEFAULT 1,
    taken_seq       INTEGER NOT NULL DEFAULT 0,
    -- Counters; limits and badges need no COUNT.
    waiting         INTEGER NOT NULL DEFAULT 0,
    waiting_bytes   INTEGER NOT NULL DEFAULT 0,
    delayed         INTEGER NOT NULL DEFAULT 0,
    created_at      INTEGER NOT NULL,
    -- The current turn.
    turn_no         INTEGER NOT NULL DEFAULT 0,
    next_hist_seq   INTEGER NOT NULL DEFAULT 1,
    rounds          INTEGER NOT NULL DEFAULT 0,
    withdrawals     INTEGER NOT NULL DEFAULT 0,
    retries         INTEGER NOT NULL DEFAULT 0,
    -- Reason of the state, for people.
    why             TEXT,
    -- 1: pause after the current turn.
    hold            INTEGER NOT NULL DEFAULT 0,
    -- Profile and parent of an agent that was created while the society ran.
    profile         TEXT NOT NULL DEFAULT '',
    parent          TEXT,
    -- The worker that has the claim, and crashes at the same step.
    worker          TEXT,
    crash_step      INTEGER NOT NULL DEFAULT 0,
    crashes         INTEGER NOT NULL DEFAULT 0,
    -- Time of the last change of state.
    since           INTEGER,
    -- Messages up to this position were cleared with the person's conversation, or are too old to be in the history.
    cleared_seq     INTEGER NOT NULL DEFAULT 0,
    -- Incremented by every change of the agent's history. A cached history is valid for one version.
    history_version INTEGER NOT NULL DEFAULT 0,
    -- Intended length of the current retry delay: the clock may be set back while the agent waits.
    retry_ms        INTEGER,
    -- 1: the person wrote a message of the turn, or a waiting one. Such agents are claimed first.
    person          INTEGER NOT NULL DEFAULT 0,
    -- When the open turn began, the task that it counts for, and other tasks whose messages it took, separated by spaces.
    task            TEXT,
    turn_began      INTEGER,
    other_tasks     TEXT,
    -- 1: blocked because the task has used its budget.
    over_budget     INTEGER NOT NULL DEFAULT 0,
    -- The reason (`why`) as JSON: category, facts, time of the retry. Clients say it in their own language.
    problem         TEXT,
    -- Delayed messages of this sender that an answer withdraws.
    reminders       INTEGER NOT NULL DEFAULT 0,
    -- No message of the person waits outside these positions.
    first_from_person INTEGER NOT NULL DEFAULT 0,
    last_from_person  INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;

CREATE INDEX agents_runnable ON agents (runnable_at) WHERE runnable_at IS NOT NULL;
CREATE INDEX agents_kind ON agents (kind);
-- The agents with mail or a turn.
CREATE INDEX agents_busy ON agents (id) WHERE waiting > 0 OR delayed > 0 OR task IS NOT NULL;

CREATE TABLE messages (
    seq             INTEGER PRIMARY KEY AUTOINCREMENT,
    id              TEXT NOT NULL UNIQUE,
    sender          TEXT NOT NULL,
    recipient       TEXT NOT NULL REFERENCES agents (id),
    state           TEXT NOT NULL CHECK (
                        state = 'pending' OR state = 'taken' OR state = 'delayed' OR state = 'withdrawn'
                        OR state = 'dead'),
    -- Position in the recipient's mailbox. NULL: not delivered yet.
    in_seq          INTEGER,
    created_at      INTEGER NOT NULL,
    deliver_at      INTEGER,
    delivered_at    INTEGER,
    taken_at        INTEGER,
    queued          INTEGER NOT NULL DEFAULT 0,
    early           INTEGER NOT NULL DEFAULT 0,
    -- How an answer ended: 0 complete, 1 stopped by the person, 2 at the length limit, 3 by a content filter.
    stopped         INTEGER NOT NULL DEFAULT 0,
    hops            INTEGER NOT NULL DEFAULT 0,
    option          INTEGER,
    in_reply_to     TEXT,
    cause           TEXT,
    replay_of       TEXT,
    reason          TEXT,
    payload         TEXT NOT NULL,
    -- 1: the reply that ended a turn. It gets no automatic reply.
    automatic       INTEGER NOT NULL DEFAULT 0,
    -- The plan whose call sent the message: "turn/step" of the sender.
    plan            TEXT,
    -- The agent in whose conversation with the person the message is shown.
    thread          TEXT,
    -- 1: a question to the person, open until answered_by is set.
    question        INTEGER NOT NULL DEFAULT 0,
    answered_by     TEXT,
    answered_option INTEGER,
    -- Failed attempts to decode the message.
    attempts        INTEGER NOT NULL DEFAULT 0,
    -- A message of a schedule: its recurrence, and how many earlier ones were due and not delivered.
    schedule_id     TEXT,
    every           TEXT,
    missed          INTEGER NOT NULL DEFAULT 0,
    -- The task that the message belongs to. NULL: it is the first of its task, whose id is its own.
    task            TEXT,
    -- The task that sent a message which starts a task of its own when it is due.
    parent_task     TEXT,
    -- A delayed message that an answer to this question withdraws; the answer that did.
    unless_answered TEXT,
    withdrawn_by    TEXT,
    -- The key of the program that sent it. NULL: the person, or an agent.
    via             TEXT
) STRICT;

CREATE UNIQUE INDEX messages_mailbox ON messages (recipient, in_seq) WHERE in_seq IS NOT NULL;
CREATE INDEX messages_due ON messages (deliver_at, seq) WHERE state = 'delayed';
CREATE INDEX messages_dead ON messages (seq) WHERE state = 'dead';
CREATE INDEX messages_plan ON messages (sender, plan) WHERE plan IS NOT NULL;
-- Ordered by delivery: the person sees a delayed message when it arrives.
CREATE INDEX messages_thread ON messages (thread, delivered_at, seq) WHERE thread IS NOT NULL;
-- `question` is a column too: otherwise SQLite would prefer `messages_sender`, and read all messages of the sender.
CREATE INDEX messages_open_questions ON messages (sender, question, seq) WHERE question = 1 AND answered_by IS NULL;
CREATE INDEX messages_answers ON messages (answered_by) WHERE answered_by IS NOT NULL;
-- Not "recipient = 'user'": SQLite would prepare every query with a recipient parameter again for each value.
CREATE INDEX messages_unread ON messages (thread, delivered_at, seq)
    WHERE thread IS NOT NULL AND sender <> 'user' AND state = 'pending';

-- Listings of one agent's messages, newest first.
CREATE INDEX messages_sender ON messages (sender, seq);
CREATE INDEX messages_recipient ON messages (recipient, seq);
CREATE INDEX messages_schedule ON messages (schedule_id) WHERE schedule_id IS NOT NULL;
CREATE INDEX messages_task ON messages (task, seq) WHERE task IS NOT NULL;
CREATE INDEX messages_parent_task ON messages (parent_task) WHERE parent_task IS NOT NULL;
CREATE INDEX messages_unless_answered ON messages (unless_answered) WHERE unless_answered IS NOT NULL;
CREATE INDEX messages_withdrawn_by ON messages (withdrawn_by) WHERE withdrawn_by IS NOT NULL;

-- Everything that one message set off. Its id is that of its first message. The counters are changed in the transaction
-- of what they count. A task has no row as long as its first message waits for an agent and nothing else is there.
CREATE TABLE tasks (
    -- Order of the starts.
    seq             INTEGER PRIMARY KEY,
    id              TEXT NOT NULL UNIQUE,
    -- The task that scheduled the first message.
    parent          TEXT,
    sender          TEXT NOT NULL,
    agent           TEXT NOT NULL,
    -- Derived from the counters below: stopped, working if something is queued or active, waiting if a question is open.
    state           TEXT NOT NULL DEFAULT 'working' CHECK (
                        state = 'working' OR state = 'done' OR state = 'waiting' OR state = 'failed'
                        OR state = 'stopped'),
    created_at      INTEGER NOT NULL,
    last_at         INTEGER NOT NULL,
    stopped_at      INTEGER,
    -- Messages that wait for agents or are delayed by less than a minute, agents at work, open questions.
    queued          INTEGER NOT NULL DEFAULT 0,
    active          INTEGER NOT NULL DEFAULT 0,
    questions       INTEGER NOT NULL DEFAULT 0,
    -- 1: the last message to the person reported a failure.
    failed          INTEGER NOT NULL DEFAULT 0,
    messages        INTEGER NOT NULL DEFAULT 0,
    turns           INTEGER NOT NULL DEFAULT 0,
    requests        INTEGER NOT NULL DEFAULT 0,
    input_tokens    INTEGER NOT NULL DEFAULT 0,
    output_tokens   INTEGER NOT NULL DEFAULT 0,
    cached_tokens   INTEGER NOT NULL DEFAULT 0,
    tool_calls      INTEGER NOT NULL DEFAULT 0,
    model_ms        INTEGER NOT NULL DEFAULT 0,
    -- In billionths of the currency; requests without a known price are counted in unpriced.
    cost            INTEGER NOT NULL DEFAULT 0,
    unpriced        INTEGER NOT NULL DEFAULT 0,
    -- Budgets granted, questions asked about them, and the one that is open.
    budgets         INTEGER NOT NULL DEFAULT 1,
    budget_asks     INTEGER NOT NULL DEFAULT 0,
    budget_question TEXT
) STRICT;

-- Most tasks are done. Those at work are found by their agents and messages.
CREATE INDEX tasks_rare ON tasks (state, seq) WHERE state = 'waiting' OR state = 'failed' OR state = 'stopped';
-- What happened since a time. A task at work changes its time with every step, so it is not in the index.
CREATE INDEX tasks_ended ON tasks (last_at) WHERE state <> 'working';
CREATE INDEX tasks_agent ON tasks (agent, seq);

-- Ended turns, each counted for the task of the newest message that it took.
CREATE TABLE turns (
    agent_id   TEXT NOT NULL,
    turn_no    INTEGER NOT NULL,
    task       TEXT NOT NULL,
    started_at INTEGER NOT NULL,
    ended_at   INTEGER NOT NULL,
    outcome    TEXT NOT NULL CHECK (outcome = 'done' OR outcome = 'failed' OR outcome = 'stopped'),
    PRIMARY KEY (task, agent_id, turn_no)
) STRICT, WITHOUT ROWID;

-- With the open turns, which are in the rows of their agents.
CREATE VIEW all_turns AS
SELECT agent_id, turn_no, task, started_at, ended_at, outcome FROM turns
 UNION ALL
SELECT id, turn_no, task, turn_began, CAST(NULL AS INTEGER), CAST(NULL AS TEXT) FROM agents WHERE task IS NOT NULL;

-- Tasks that an agent has worked on.
CREATE INDEX turns_agent ON turns (agent_id, task);

CREATE INDEX agents_other_tasks ON agents (id) WHERE other_tasks IS NOT NULL;

CREATE TABLE artifacts (
    ref        TEXT PRIMARY KEY,
    filename   TEXT NOT NULL,
    type       TEXT NOT NULL CHECK (type = 'image' OR type = 'audio' OR type = 'file'),
    mime_type  TEXT NOT NULL,
    size       INTEGER NOT NULL,
    sha256     TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    -- The agent that made the file. NULL: the person.
    maker      TEXT
) STRICT, WITHOUT ROWID;

CREATE INDEX artifacts_sha256 ON artifacts (sha256);
CREATE INDEX artifacts_created ON artifacts (created_at);
CREATE INDEX artifacts_maker ON artifacts (maker, created_at) WHERE maker IS NOT NULL;

-- An artifact that no message carries and no history shows is deleted after a day.
CREATE TABLE attachments (
    artifact_ref TEXT NOT NULL REFERENCES artifacts (ref),
    message_seq  INTEGER NOT NULL REFERENCES messages (seq) ON DELETE CASCADE,
    PRIMARY KEY (artifact_ref, message_seq)
) STRICT, WITHOUT ROWID;

CREATE INDEX attachments_message ON attachments (message_seq);

-- The event log.
CREATE TABLE events (
    -- Strictly increasing without AUTOINCREMENT, because the newest row is never deleted.
    seq     INTEGER PRIMARY KEY,
    at      INTEGER NOT NULL,
    kind    TEXT NOT NULL,
    subject TEXT NOT NULL,
    -- JSON with facts that no other table keeps.
    data    TEXT
) STRICT;

-- One row about the society. PostgreSQL keeps the number of the last event in the same table.
CREATE TABLE log (
    -- 1: no agent starts a model request or a tool call.
    paused INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO log (paused) VALUES (0);

-- What models are shown. Append-only: an assistant row with calls is followed by exactly their results.
CREATE TABLE history (
    agent_id   TEXT NOT NULL REFERENCES agents (id),
    seq        INTEGER NOT NULL,
    turn_no    INTEGER NOT NULL,
    role       TEXT NOT NULL CHECK (role = 'user' OR role = 'assistant' OR role = 'tool'),
    -- User rows: the message.
    message_id TEXT,
    content    TEXT,
    calls      TEXT,
    call_id    TEXT,
    hidden     INTEGER NOT NULL DEFAULT 0,
    -- Tool rows: references to files of the result that the model is shown, as JSON. NULL: none.
    attachments TEXT,
    PRIMARY KEY (agent_id, seq)
) STRICT, WITHOUT ROWID;

CREATE UNIQUE INDEX history_message ON history (message_id) WHERE message_id IS NOT NULL;
-- A covering index: otherwise SQLite reads the agent's whole history for every answer.
CREATE INDEX history_turn ON history (agent_id, turn_no, seq, message_id) WHERE message_id IS NOT NULL;

-- Files that rows of histories show, so that they are kept as long as these rows.
CREATE TABLE history_artifacts (
    agent_id     TEXT NOT NULL,
    seq          INTEGER NOT NULL,
    artifact_ref TEXT NOT NULL,
    PRIMARY KEY (agent_id, seq, artifact_ref),
    FOREIGN KEY (agent_id, seq) REFERENCES history (agent_id, seq) ON DELETE CASCADE
) STRICT, WITHOUT ROWID;

CREATE INDEX history_artifacts_ref ON history_artifacts (artifact_ref);

CREATE TABLE plans (
    seq            INTEGER PRIMARY KEY AUTOINCREMENT,
    agent_id       TEXT NOT NULL REFERENCES agents (id),
    turn_no        INTEGER NOT NULL,
    step_no        INTEGER NOT NULL,
    text           TEXT NOT NULL,
    outcome        TEXT NOT NULL CHECK (outcome = 'open' OR outcome = 'closed' OR outcome = 'withdrawn'),
    -- The message that interrupted the plan.
    interrupted_by TEXT,
    at             INTEGER NOT NULL,
    task           TEXT,
    UNIQUE (agent_id, turn_no, step_no)
) STRICT;

CREATE UNIQUE INDEX plans_open ON plans (agent_id) WHERE outcome = 'open';

-- Tool calls of a plan.
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
    attachments TEXT,
    PRIMARY KEY (agent_id, turn_no, step_no, idx),
    FOREIGN KEY (agent_id, turn_no, step_no) REFERENCES plans (agent_id, turn_no, step_no)
) STRICT, WITHOUT ROWID;

CREATE TABLE roles (
    name    TEXT PRIMARY KEY,
    profile TEXT NOT NULL,
    -- The agent that created the role; only this agent may change it. NULL: the owner.
    maker   TEXT
) STRICT, WITHOUT ROWID;

-- Token usage of model requests. call_no 0 is the answer of the step; summaries for it count from 1.
CREATE TABLE llm_calls (
    agent_id      TEXT NOT NULL,
    turn_no       INTEGER NOT NULL,
    step_no       INTEGER NOT NULL,
    call_no       INTEGER NOT NULL DEFAULT 0,
    service       TEXT NOT NULL,
    input_tokens  INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    outcome       TEXT NOT NULL CHECK (outcome IN ('used', 'withdrawn')),
    at            INTEGER NOT NULL,
    -- 1: the service did not report its tokens; these are an estimate.
    estimated     INTEGER NOT NULL DEFAULT 0,
    -- NULL: tokens that are reserved, not used.
    task          TEXT,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    -- In billionths of the currency. NULL: the service has no price.
    cost          INTEGER,
    model_ms      INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (agent_id, turn_no, step_no, call_no)
) STRICT, WITHOUT ROWID;

CREATE INDEX llm_calls_at ON llm_calls (at);

-- Texts that stand for the older part of a history. The rows themselves stay.
CREATE TABLE summaries (
    agent_id TEXT NOT NULL REFERENCES agents (id),
    upto     INTEGER NOT NULL,
    text     TEXT NOT NULL,
    at       INTEGER NOT NULL,
    PRIMARY KEY (agent_id, upto)
) STRICT, WITHOUT ROWID;

-- Recurring messages. An active one has exactly one delayed message.
CREATE TABLE schedules (
    id          TEXT PRIMARY KEY,
    sender      TEXT NOT NULL,
    recipient   TEXT NOT NULL REFERENCES agents (id),
    payload     TEXT NOT NULL,
    -- With the time zone: "weekdays 08:00 Europe/Berlin".
    every       TEXT NOT NULL,
    state       TEXT NOT NULL CHECK (state = 'active' OR state = 'paused' OR state = 'ended'),
    created_at  INTEGER NOT NULL,
    cause       TEXT,
    -- The next occurrence, and when it is due by the recurrence. A person may move the message itself.
    message_id  TEXT NOT NULL,
    due_at      INTEGER NOT NULL,
    -- The occurrence that was delivered last.
    previous_id TEXT
) STRICT, WITHOUT ROWID;

CREATE INDEX schedules_sender ON schedules (sender) WHERE state <> 'ended';

-- Keys of programs. Only the hash of a key's token is stored. A revoked key stays, because messages name it.
CREATE TABLE keys (
    name       TEXT PRIMARY KEY,
    digest     TEXT NOT NULL UNIQUE,
    -- JSON array of the agents that it may reach. NULL: all.
    agents     TEXT,
    -- JSON array.
    doors      TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    -- To the minute.
    used_at    INTEGER,
    revoked_at INTEGER
) STRICT, WITHOUT ROWID;

-- The text index: each message by its grams. See stores/sql/text_index.py. It keeps no texts, and only we merge its
-- segments.
CREATE VIRTUAL TABLE message_grams USING fts5 (
    grams, content = '', detail = none, tokenize = "ascii tokenchars '_'");
INSERT INTO message_grams (message_grams, rank) VALUES ('automerge', 0);
INSERT INTO message_grams (message_grams, rank) VALUES ('crisismerge', 1000);

-- Deleted messages whose entries are still in the text index. FTS5 needs their texts to remove the entries.
CREATE TABLE index_removals (
    seq       INTEGER PRIMARY KEY,
    sender    TEXT NOT NULL,
    recipient TEXT NOT NULL,
    payload   TEXT NOT NULL
) STRICT;

-- Addresses that get a POST when a task changes.
CREATE TABLE push_configs (
    task     TEXT NOT NULL REFERENCES tasks (id) ON DELETE CASCADE,
    id       TEXT NOT NULL,
    -- The whole config as JSON, with its address and credentials.
    config   TEXT NOT NULL,
    -- The change of the task that was sent last; empty: none.
    notified TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    -- No process sends before this time: the next attempt, or the end of the attempt that a process makes now.
    next_at  INTEGER NOT NULL DEFAULT 0,
    -- 1: the end of the task was sent.
    ended    INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (task, id)
) STRICT, WITHOUT ROWID;

CREATE INDEX push_configs_open ON push_configs (next_at) WHERE ended = 0;
