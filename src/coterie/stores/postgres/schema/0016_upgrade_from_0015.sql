-- Two positions per agent replace an index that every message of the person was written to twice.
ALTER TABLE agents ADD COLUMN first_from_person BIGINT NOT NULL DEFAULT 0;
ALTER TABLE agents ADD COLUMN last_from_person BIGINT NOT NULL DEFAULT 0;
UPDATE agents SET last_from_person = next_in_seq - 1 WHERE kind = 'agent';
DROP INDEX messages_from_person;
