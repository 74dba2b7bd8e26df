-- compatible
-- The text index: each message by its grams. See stores/sql/text_index.py.
CREATE TABLE message_grams (
    rowid BIGINT PRIMARY KEY,
    grams TSVECTOR NOT NULL
) WITH (toast_tuple_target = 128);

-- A short list of new entries: merging it into the index must not take long.
CREATE INDEX message_grams_words ON message_grams USING gin (grams) WITH (gin_pending_list_limit = 256);

-- The lock is the one that indexing holds: no entry is added for a message that is being deleted.
CREATE FUNCTION remove_from_text_index() RETURNS TRIGGER LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM meta WHERE key = 'text_index_position' FOR SHARE;
    DELETE FROM message_grams USING deleted WHERE message_grams.rowid = deleted.seq;
    RETURN NULL;
END
$$;
CREATE TRIGGER messages_text_index AFTER DELETE ON messages REFERENCING OLD TABLE AS deleted
    FOR EACH STATEMENT EXECUTE FUNCTION remove_from_text_index();

-- Addresses that get a POST when a task changes.
CREATE TABLE push_configs (
    task     TEXT COLLATE "C" NOT NULL REFERENCES tasks (id) ON DELETE CASCADE,
    id       TEXT COLLATE "C" NOT NULL,
    -- The whole config as JSON, with its address and credentials.
    config   TEXT COLLATE "C" NOT NULL,
    -- The change of the task that was sent last; empty: none.
    notified TEXT COLLATE "C" NOT NULL,
    attempts BIGINT NOT NULL DEFAULT 0,
    -- No process sends before this time: the next attempt, or the end of the attempt that a process makes now.
    next_at  BIGINT NOT NULL DEFAULT 0,
    -- 1: the end of the task was sent.
    ended    BIGINT NOT NULL DEFAULT 0,
    PRIMARY KEY (task, id)
);

CREATE INDEX push_configs_open ON push_configs (next_at) WHERE ended = 0;
