-- Counts the changes of an agent's history: rows, hidden rows, summaries, clears. Caches of a history are valid for one
-- version only.
ALTER TABLE agents ADD COLUMN history_version INTEGER NOT NULL DEFAULT 0;
