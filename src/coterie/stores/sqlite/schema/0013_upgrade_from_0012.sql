-- Tasks. The schema file explains the columns.
ALTER TABLE agents ADD COLUMN task TEXT;
ALTER TABLE agents ADD COLUMN turn_began INTEGER;
ALTER TABLE agents ADD COLUMN other_tasks TEXT;
ALTER TABLE agents ADD COLUMN over_budget INTEGER NOT NULL DEFAULT 0;
ALTER TABLE agents ADD COLUMN problem TEXT;
ALTER TABLE agents ADD COLUMN reminders INTEGER NOT NULL DEFAULT 0;
ALTER TABLE messages ADD COLUMN task TEXT;
ALTER TABLE messages ADD COLUMN parent_task TEXT;
ALTER TABLE messages ADD COLUMN unless_answered TEXT;
ALTER TABLE messages ADD COLUMN withdrawn_by TEXT;
ALTER TABLE messages ADD COLUMN via TEXT;
ALTER TABLE plans ADD COLUMN task TEXT;
ALTER TABLE llm_calls ADD COLUMN task TEXT;
ALTER TABLE llm_calls ADD COLUMN cached_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE llm_calls ADD COLUMN cost INTEGER;
ALTER TABLE llm_calls ADD COLUMN model_ms INTEGER NOT NULL DEFAULT 0;
CREATE INDEX messages_task ON messages (task, seq) WHERE task IS NOT NULL;
CREATE INDEX messages_parent_task ON messages (parent_task) WHERE parent_task IS NOT NULL;
CREATE INDEX messages_unless_answered ON messages (unless_answered) WHERE unless_answered IS NOT NULL;

CREATE TABLE tasks (
    seq             INTEGER PRIMARY KEY,
    id              TEXT NOT NULL UNIQUE,
    parent          TEXT,
    sender          TEXT NOT NULL,
    agent           TEXT NOT NULL,
    state           TEXT NOT NULL DEFAULT 'working' CHECK (
                        state = 'working' OR state = 'done' OR state = 'waiting' OR state = 'failed'
                        OR state = 'stopped'),
    created_at      INTEGER NOT NULL,
    last_at         INTEGER NOT NULL,
    stopped_at      INTEGER,
    queued          INTEGER NOT NULL DEFAULT 0,
    active          INTEGER NOT NULL DEFAULT 0,
    questions       INTEGER NOT NULL DEFAULT 0,
    failed          INTEGER NOT NULL DEFAULT 0,
    messages        INTEGER NOT NULL DEFAULT 0,
    turns           INTEGER NOT NULL DEFAULT 0,
    requests        INTEGER NOT NULL DEFAULT 0,
    input_tokens    INTEGER NOT NULL DEFAULT 0,
    output_tokens   INTEGER NOT NULL DEFAULT 0,
    cached_tokens   INTEGER NOT NULL DEFAULT 0,
    tool_calls      INTEGER NOT NULL DEFAULT 0,
    model_ms        INTEGER NOT NULL DEFAULT 0,
    cost            INTEGER NOT NULL DEFAULT 0,
    unpriced        INTEGER NOT NULL DEFAULT 0,
    budgets         INTEGER NOT NULL DEFAULT 1,
    budget_asks     INTEGER NOT NULL DEFAULT 0,
    budget_question TEXT
) STRICT;

CREATE INDEX tasks_rare ON tasks (state, seq) WHERE state = 'waiting' OR state = 'failed' OR state = 'stopped';

CREATE TABLE turns (
    agent_id   TEXT NOT NULL,
    turn_no    INTEGER NOT NULL,
    task       TEXT NOT NULL,
    started_at INTEGER NOT NULL,
    ended_at   INTEGER NOT NULL,
    outcome    TEXT NOT NULL CHECK (outcome = 'done' OR outcome = 'failed' OR outcome = 'stopped'),
    PRIMARY KEY (task, agent_id, turn_no)
) STRICT, WITHOUT ROWID;

CREATE VIEW all_turns AS
SELECT agent_id, turn_no, task, started_at, ended_at, outcome FROM turns
 UNION ALL
SELECT id, turn_no, task, turn_began, CAST(NULL AS INTEGER), CAST(NULL AS TEXT) FROM agents WHERE task IS NOT NULL;

CREATE INDEX agents_other_tasks ON agents (id) WHERE other_tasks IS NOT NULL;

-- Old chains of causes become tasks. A message has the same task as the message that caused it, or as the question
-- that it answers. One that was delayed by a minute or more, or that recurs, starts a task of its own.
CREATE TABLE upgrade_parents AS
SELECT messages.id, parents.id AS parent
  FROM messages
  JOIN messages AS parents
    ON parents.seq < messages.seq
   AND parents.id = coalesce(messages.cause, CASE WHEN messages.sender = 'user' THEN messages.in_reply_to END)
 WHERE (messages.deliver_at IS NULL OR messages.deliver_at - messages.created_at < 60000)
   AND messages.schedule_id IS NULL AND messages.replay_of IS NULL
   AND (messages.cause IS NOT NULL OR parents.answered_by = messages.id);
CREATE INDEX upgrade_parents_parent ON upgrade_parents (parent);
CREATE UNIQUE INDEX upgrade_parents_id ON upgrade_parents (id);
UPDATE messages SET task = chain.task
  FROM (WITH RECURSIVE chain (id, task) AS
         (SELECT messages.id, messages.id FROM messages
           WHERE NOT EXISTS (SELECT 1 FROM upgrade_parents WHERE upgrade_parents.id = messages.id)
          UNION ALL
          SELECT upgrade_parents.id, chain.task FROM chain
            JOIN upgrade_parents ON upgrade_parents.parent = chain.id)
        SELECT id, task FROM chain WHERE id <> task) AS chain
 WHERE messages.id = chain.id;
DROP TABLE upgrade_parents;
UPDATE messages SET parent_task = (
    SELECT coalesce(caused.task, caused.id) FROM messages AS caused WHERE caused.id = messages.cause)
 WHERE task IS NULL AND cause IS NOT NULL;

CREATE TABLE upgrade_turns AS
SELECT spans.agent_id, spans.turn_no, coalesce(newest.task, newest.id) AS task, oldest.taken_at AS started_at,
       coalesce((SELECT max(at) FROM llm_calls
                  WHERE llm_calls.agent_id = spans.agent_id AND llm_calls.turn_no = spans.turn_no),
                newest.taken_at) AS ended_at,
       CASE WHEN agents.turn_no = spans.turn_no
                 AND agents.state IN ('llm', 'tools', 'wait_approval', 'wait_retry', 'blocked') THEN 1
            ELSE 0 END AS is_open
  FROM (SELECT agent_id, turn_no, min(seq) AS first_seq, max(seq) AS last_seq FROM history
         WHERE message_id IS NOT NULL GROUP BY agent_id, turn_no) AS spans
  JOIN agents ON agents.id = spans.agent_id
  JOIN history AS last ON last.agent_id = spans.agent_id AND last.seq = spans.last_seq
  JOIN messages AS newest ON newest.id = last.message_id
  JOIN history AS first ON first.agent_id = spans.agent_id AND first.seq = spans.first_seq
  JOIN messages AS oldest ON oldest.id = first.message_id;
CREATE UNIQUE INDEX upgrade_turns_key ON upgrade_turns (agent_id, turn_no);
INSERT INTO turns (agent_id, turn_no, task, started_at, ended_at, outcome)
SELECT agent_id, turn_no, task, started_at, ended_at, 'done' FROM upgrade_turns WHERE is_open = 0;
UPDATE agents SET task = upgrade_turns.task, turn_began = upgrade_turns.started_at
  FROM upgrade_turns
 WHERE upgrade_turns.agent_id = agents.id AND upgrade_turns.turn_no = agents.turn_no AND upgrade_turns.is_open = 1;
UPDATE agents SET other_tasks = (
    SELECT group_concat(task, ' ') FROM (
        SELECT DISTINCT coalesce(messages.task, messages.id) AS task
          FROM history JOIN messages ON messages.id = history.message_id
         WHERE history.agent_id = agents.id AND history.turn_no = agents.turn_no
           AND coalesce(messages.task, messages.id) <> agents.task) AS others)
 WHERE task IS NOT NULL;
UPDATE plans SET task = (
    SELECT upgrade_turns.task FROM upgrade_turns
     WHERE upgrade_turns.agent_id = plans.agent_id AND upgrade_turns.turn_no = plans.turn_no);
UPDATE llm_calls SET task = (
    SELECT upgrade_turns.task FROM upgrade_turns
     WHERE upgrade_turns.agent_id = llm_calls.agent_id AND upgrade_turns.turn_no = llm_calls.turn_no);
DROP TABLE upgrade_turns;

INSERT INTO tasks (id, parent, sender, agent, created_at, last_at, queued, questions, messages)
SELECT first.id, first.parent_task, first.sender, first.recipient, coalesce(first.delivered_at, first.created_at),
       counted.last_at, counted.queued, counted.questions, counted.messages
  FROM messages AS first
  JOIN (SELECT CAST(coalesce(task, id) AS TEXT) AS task, count(*) AS messages,
               max(coalesce(taken_at, delivered_at, created_at)) AS last_at,
               sum(CASE WHEN (state = 'pending' AND recipient <> 'user')
                          OR (state = 'delayed' AND deliver_at - created_at < 60000 AND schedule_id IS NULL)
                        THEN 1 ELSE 0 END) AS queued,
               sum(CASE WHEN question = 1 AND answered_by IS NULL AND state IN ('pending', 'taken')
                        THEN 1 ELSE 0 END) AS questions
          FROM messages GROUP BY coalesce(task, id)) AS counted ON counted.task = first.id
 WHERE first.task IS NULL
   AND NOT (first.state = 'pending' AND first.deliver_at IS NULL AND first.recipient <> 'user')
   AND (first.delivered_at IS NOT NULL OR first.deliver_at IS NULL
        OR (first.deliver_at - first.created_at < 60000 AND first.schedule_id IS NULL))
 ORDER BY coalesce(first.delivered_at, first.created_at), first.seq;
UPDATE tasks SET turns = (SELECT count(*) FROM all_turns WHERE all_turns.task = tasks.id),
                 active = (SELECT count(*) FROM agents
                            WHERE agents.task = tasks.id AND agents.state IN ('llm', 'tools', 'wait_retry'))
                        + (SELECT count(*) FROM agents
                            WHERE replace(agents.other_tasks, tasks.id, '') <> agents.other_tasks
                              AND agents.state IN ('llm', 'tools', 'wait_retry', 'wait_approval')),
                 failed = coalesce((SELECT CASE WHEN messages.sender = 'system' THEN 1 ELSE 0 END FROM messages
                                     WHERE messages.task = tasks.id AND messages.recipient = 'user'
                                       AND messages.delivered_at IS NOT NULL
                                     ORDER BY messages.seq DESC LIMIT 1), 0);
UPDATE tasks SET requests = counted.requests, unpriced = counted.requests, input_tokens = counted.input_tokens,
                 output_tokens = counted.output_tokens
  FROM (SELECT task, count(*) AS requests, sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens
          FROM llm_calls WHERE task IS NOT NULL GROUP BY task) AS counted
 WHERE tasks.id = counted.task;
UPDATE tasks SET tool_calls = counted.calls
  FROM (SELECT plans.task, count(*) AS calls FROM plans
          JOIN calls ON calls.agent_id = plans.agent_id AND calls.turn_no = plans.turn_no
                    AND calls.step_no = plans.step_no
         WHERE plans.task IS NOT NULL AND plans.outcome <> 'withdrawn' GROUP BY plans.task) AS counted
 WHERE tasks.id = counted.task;
UPDATE tasks SET state = CASE WHEN queued + active > 0 THEN 'working' WHEN questions > 0 THEN 'waiting'
                              WHEN failed = 1 THEN 'failed' ELSE 'done' END;

CREATE TABLE keys (
    name       TEXT PRIMARY KEY,
    digest     TEXT NOT NULL UNIQUE,
    agents     TEXT,
    doors      TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    used_at    INTEGER,
    revoked_at INTEGER
) STRICT, WITHOUT ROWID;

-- Files that rows of histories show, so that they are kept as long as these rows.
CREATE TABLE history_artifacts (
    agent_id     TEXT NOT NULL,
    seq          INTEGER NOT NULL,
    artifact_ref TEXT NOT NULL,
    PRIMARY KEY (agent_id, seq, artifact_ref),
    FOREIGN KEY (agent_id, seq) REFERENCES history (agent_id, seq) ON DELETE CASCADE
) STRICT, WITHOUT ROWID;

CREATE INDEX history_artifacts_ref ON history_artifacts (artifact_ref);
INSERT INTO history_artifacts (agent_id, seq, artifact_ref)
SELECT DISTINCT history.agent_id, history.seq, json_extract(file.value, '$.artifactRef')
  FROM history, json_each(history.attachments) AS file
 WHERE history.attachments IS NOT NULL AND json_extract(file.value, '$.artifactRef') IS NOT NULL;

DROP INDEX messages_open_questions;
CREATE INDEX messages_open_questions ON messages (sender, question, seq) WHERE question = 1 AND answered_by IS NULL;
CREATE INDEX messages_sender ON messages (sender, seq);
CREATE INDEX messages_recipient ON messages (recipient, seq);
CREATE INDEX turns_agent ON turns (agent_id, task);
CREATE INDEX tasks_ended ON tasks (last_at) WHERE state <> 'working';
CREATE INDEX tasks_agent ON tasks (agent, seq);
CREATE INDEX agents_kind ON agents (kind);
CREATE INDEX agents_busy ON agents (id) WHERE waiting > 0 OR delayed > 0 OR task IS NOT NULL;
