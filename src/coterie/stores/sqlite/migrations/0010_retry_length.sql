-- How long a wait for the next try was meant to be: the clock may be set back while an agent waits.
ALTER TABLE agents ADD COLUMN retry_ms INTEGER;
