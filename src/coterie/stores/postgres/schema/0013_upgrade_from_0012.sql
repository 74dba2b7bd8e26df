-- compatible
-- Where programs want to be told about a task.
CREATE TABLE push_configs (
    task     TEXT COLLATE "C" NOT NULL REFERENCES tasks (id) ON DELETE CASCADE,
    id       TEXT COLLATE "C" NOT NULL,
    -- The whole config as JSON, with its address and credentials.
    config   TEXT COLLATE "C" NOT NULL,
    -- The change of the task that was told last; empty: none.
    told     TEXT COLLATE "C" NOT NULL,
    attempts BIGINT NOT NULL DEFAULT 0,
    -- Nobody tells before this time: the next attempt, or the end of the attempt that a process makes now.
    next_at  BIGINT NOT NULL DEFAULT 0,
    -- 1: the end of the task was told.
    ended    BIGINT NOT NULL DEFAULT 0,
    PRIMARY KEY (task, id)
);

CREATE INDEX push_configs_open ON push_configs (next_at) WHERE ended = 0;
