-- Deleted messages whose entries are still in the text index. FTS5 needs their texts to remove the entries.
CREATE TABLE index_removals (
    seq       INTEGER PRIMARY KEY,
    sender    TEXT NOT NULL,
    recipient TEXT NOT NULL,
    payload   TEXT NOT NULL
) STRICT;
