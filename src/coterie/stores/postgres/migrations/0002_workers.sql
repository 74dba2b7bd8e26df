-- Who a process is, for people, and what it has counted since it began: written with each sign of life.
ALTER TABLE processes ADD COLUMN worker TEXT COLLATE "C";
ALTER TABLE processes ADD COLUMN name TEXT COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE processes ADD COLUMN began_at BIGINT NOT NULL DEFAULT 0;
ALTER TABLE processes ADD COLUMN heartbeats BIGINT NOT NULL DEFAULT 0;
ALTER TABLE processes ADD COLUMN fenced BIGINT NOT NULL DEFAULT 0;
ALTER TABLE processes ADD COLUMN takeovers BIGINT NOT NULL DEFAULT 0;
