-- 1: the person wrote one of the messages of the turn, or of the mail that waits. Such agents are claimed first.
ALTER TABLE agents ADD COLUMN person BIGINT NOT NULL DEFAULT 0;

-- Of the requests that wait for a slot, how many are for a message of the person.
ALTER TABLE places ADD COLUMN urgent BIGINT NOT NULL DEFAULT 0;
