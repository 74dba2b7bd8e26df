-- Places at model services: how many a process keeps, and how many it waits for. Nothing of it outlives a crash.
CREATE UNLOGGED TABLE places (
    service  TEXT COLLATE "C" NOT NULL,
    process  TEXT COLLATE "C" NOT NULL,
    kept     BIGINT NOT NULL,
    waiting  BIGINT NOT NULL,
    asked_at BIGINT NOT NULL,
    PRIMARY KEY (service, process)
);
