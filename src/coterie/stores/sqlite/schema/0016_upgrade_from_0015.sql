-- compatible
-- The reminders that an answer has withdrawn.
CREATE INDEX messages_withdrawn_by ON messages (withdrawn_by) WHERE withdrawn_by IS NOT NULL;
