-- How often reading it has failed: a message that nobody can read must not keep others from being read.
ALTER TABLE messages ADD COLUMN attempts INTEGER NOT NULL DEFAULT 0;
