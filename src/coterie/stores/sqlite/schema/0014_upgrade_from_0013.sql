-- The text index: each message by its grams. See stores/sql/text_index.py. It keeps no texts, and only we merge its
-- segments.
CREATE VIRTUAL TABLE message_grams USING fts5 (
    grams, content = '', detail = none, tokenize = "ascii tokenchars '_'");
INSERT INTO message_grams (message_grams, rank) VALUES ('automerge', 0);
INSERT INTO message_grams (message_grams, rank) VALUES ('crisismerge', 1000);
