-- 1: the person wrote one of the messages of the turn, or of the mail that waits. Such agents are claimed first.
ALTER TABLE agents ADD COLUMN person INTEGER NOT NULL DEFAULT 0;
