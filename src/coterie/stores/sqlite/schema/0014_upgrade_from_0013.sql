-- The text index: each message by its grams. See stores/sql/text_index.py. It keeps no texts, and only we merge its
-- segments.
CREATE VIRTUAL TABLE message_grams USING fts5 (
    grams, content = '', detail = none, tokenize = "ascii tokenchars '_'");
INSERT INTO message_grams (message_grams, rank) VALUES ('automerge', 0);
INSERT INTO message_grams (message_grams, rank) VALUES ('crisismerge', 1000);

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
