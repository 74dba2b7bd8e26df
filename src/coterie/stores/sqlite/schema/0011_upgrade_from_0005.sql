-- Upgrade of societies made before rights, estimates and pauses were stored. The schema file explains the columns.
ALTER TABLE agents ADD COLUMN history_version INTEGER NOT NULL DEFAULT 0;
CREATE TABLE log (
    paused INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO log (paused) VALUES (0);
ALTER TABLE roles ADD COLUMN maker TEXT;
ALTER TABLE artifacts ADD COLUMN maker TEXT;
CREATE INDEX artifacts_maker ON artifacts (maker, created_at) WHERE maker IS NOT NULL;
INSERT INTO meta (key, value) VALUES ('secret', lower(hex(randomblob(32)))) ON CONFLICT (key) DO NOTHING;

ALTER TABLE llm_calls ADD COLUMN estimated INTEGER NOT NULL DEFAULT 0;
ALTER TABLE agents ADD COLUMN retry_ms INTEGER;
ALTER TABLE agents ADD COLUMN person INTEGER NOT NULL DEFAULT 0;
