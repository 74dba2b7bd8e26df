-- In the row that every writing transaction locks last: so a pause and a claim are always ordered.
ALTER TABLE log ADD COLUMN paused INTEGER NOT NULL DEFAULT 0;
