-- The person's conversation that it belongs to: the id of the agent they talk with.
ALTER TABLE messages ADD COLUMN thread TEXT;
-- It offers the person quick replies; answered once a message of theirs says so.
ALTER TABLE messages ADD COLUMN question INTEGER NOT NULL DEFAULT 0;
ALTER TABLE messages ADD COLUMN answered_by TEXT;
ALTER TABLE messages ADD COLUMN answered_option INTEGER;

-- By delivery and not by sending: what was delayed stands where the person met it.
CREATE INDEX messages_thread ON messages (thread, delivered_at, seq) WHERE thread IS NOT NULL;
CREATE INDEX messages_open_questions ON messages (sender, seq) WHERE question = 1 AND answered_by IS NULL;
CREATE INDEX messages_answers ON messages (answered_by) WHERE answered_by IS NOT NULL;
DROP INDEX messages_unread;
CREATE INDEX messages_unread ON messages (thread, delivered_at, seq) WHERE recipient = 'user' AND state = 'pending';

-- What could not be looked up afterwards, as JSON.
ALTER TABLE events ADD COLUMN data TEXT;

-- When it came into its state.
ALTER TABLE agents ADD COLUMN since INTEGER;
-- What it took up to this place in its mailbox is forgotten: the person cleared their conversation.
ALTER TABLE agents ADD COLUMN cleared_seq INTEGER NOT NULL DEFAULT 0;
