-- The agent that described the role; only it may describe it anew. NULL: the owner, or it was made before this was kept.
ALTER TABLE roles ADD COLUMN maker TEXT;
-- The agent that made the file. NULL: the person did, or it was made before this was kept.
ALTER TABLE artifacts ADD COLUMN maker TEXT;
CREATE INDEX artifacts_maker ON artifacts (maker, created_at) WHERE maker IS NOT NULL;
