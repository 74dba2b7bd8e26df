-- compatible
-- A process is judged by its own lease. The default is that of programs that do not store it.
ALTER TABLE processes ADD COLUMN lease_ms BIGINT NOT NULL DEFAULT 30000;
