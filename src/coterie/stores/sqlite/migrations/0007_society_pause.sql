-- One row: facts about the society as a whole. PostgreSQL keeps the number of the last event in the same table.
CREATE TABLE log (
    -- 1: nobody begins anything, whoever it is and whenever it was made.
    paused INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO log (paused) VALUES (0);
