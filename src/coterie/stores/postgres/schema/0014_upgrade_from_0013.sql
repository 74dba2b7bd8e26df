-- compatible
-- Used on SQLite only: there the entries of a cleared conversation are removed later. `verify` reads it on both engines.
CREATE TABLE index_removals (
    seq       BIGINT PRIMARY KEY,
    sender    TEXT COLLATE "C" NOT NULL,
    recipient TEXT COLLATE "C" NOT NULL,
    payload   TEXT COLLATE "C" NOT NULL
);
