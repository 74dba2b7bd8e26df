ALTER TABLE roles ADD COLUMN maker TEXT COLLATE "C";
ALTER TABLE artifacts ADD COLUMN maker TEXT COLLATE "C";
CREATE INDEX artifacts_maker ON artifacts (maker, created_at) WHERE maker IS NOT NULL;
