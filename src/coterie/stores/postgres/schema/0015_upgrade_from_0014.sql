-- compatible
-- The agents with mail or a turn, without reading all. The schema file explains the column.
ALTER TABLE agents ADD COLUMN is_busy BOOLEAN
    GENERATED ALWAYS AS (waiting > 0 OR delayed > 0 OR task IS NOT NULL) STORED;
CREATE INDEX agents_busy ON agents (id) WHERE is_busy;
-- The reminders that an answer has withdrawn.
CREATE INDEX messages_withdrawn_by ON messages (withdrawn_by) WHERE withdrawn_by IS NOT NULL;
