-- The society's secret: message ids and the marks around messages in requests are hashed with it.
INSERT INTO meta (key, value) VALUES ('secret', lower(hex(randomblob(32)))) ON CONFLICT (key) DO NOTHING;

-- 1: the service did not report its tokens, so these are our own estimate.
ALTER TABLE llm_calls ADD COLUMN estimated INTEGER NOT NULL DEFAULT 0;
