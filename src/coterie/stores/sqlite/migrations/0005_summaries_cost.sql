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
