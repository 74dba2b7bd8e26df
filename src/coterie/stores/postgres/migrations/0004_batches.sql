-- The last batch that each process has committed. The number of a transaction is not enough to tell: one that a crash of
-- the server took away may be given out again.
CREATE TABLE batches (
    process TEXT COLLATE "C" PRIMARY KEY,
    batch   TEXT COLLATE "C" NOT NULL,
    at      BIGINT NOT NULL
);
