-- Upgrade of societies made before rights, estimates and pauses were stored. The schema file explains the columns.
ALTER TABLE agents ADD COLUMN history_version BIGINT NOT NULL DEFAULT 0;
ALTER TABLE log ADD COLUMN paused INTEGER NOT NULL DEFAULT 0;
ALTER TABLE roles ADD COLUMN maker TEXT COLLATE "C";
ALTER TABLE artifacts ADD COLUMN maker TEXT COLLATE "C";
CREATE INDEX artifacts_maker ON artifacts (maker, created_at) WHERE maker IS NOT NULL;
INSERT INTO meta (key, value)
VALUES ('secret', replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', '')) ON CONFLICT (key) DO NOTHING;
ALTER TABLE llm_calls ADD COLUMN estimated INTEGER NOT NULL DEFAULT 0;
ALTER TABLE agents ADD COLUMN retry_ms BIGINT;
ALTER TABLE agents ADD COLUMN person BIGINT NOT NULL DEFAULT 0;
ALTER TABLE places ADD COLUMN urgent BIGINT NOT NULL DEFAULT 0;
