"""Addresses for push notifications about tasks: storing them, claiming one to send, recording what was sent."""

from __future__ import annotations

from typing import NamedTuple

from coterie.clock import from_ms, to_ms
from coterie.errors import Refused
from coterie.push_configs import MAX_CONFIGS, OpenPushConfig, PushConfig
from coterie.stores.sql.rows import Connection
from coterie.stores.sql.unit_of_work import UnitOfWork
from coterie.tasks import TaskState

_SELECT_TASK = "SELECT state FROM tasks WHERE id = :task"
_COUNT = "SELECT count(*) FROM push_configs WHERE task = :task AND id <> :id"
# While the task works, the state that the program knows is not sent again.
_PUT = """
INSERT INTO push_configs (task, id, config, notified) VALUES (:task, :id, :config, :notified)
    ON CONFLICT (task, id) DO UPDATE SET config = excluded.config, notified = excluded.notified, attempts = 0,
        next_at = 0, ended = 0
"""
_SELECT = "SELECT task, id, config FROM push_configs WHERE task = :task ORDER BY id"
_DELETE = "DELETE FROM push_configs WHERE task = :task AND id = :id"
_SELECT_OPEN = """
SELECT push_configs.task, push_configs.id, push_configs.config, push_configs.notified, push_configs.attempts,
       push_configs.next_at, tasks.state, tasks.last_at
  FROM push_configs JOIN tasks ON tasks.id = push_configs.task WHERE push_configs.ended = 0
"""
_CLAIM = """
UPDATE push_configs SET next_at = :until WHERE task = :task AND id = :id AND next_at = :seen AND notified = :notified
"""
_SENT = """
UPDATE push_configs SET notified = :change, attempts = 0, next_at = 0, ended = :ended WHERE task = :task AND id = :id
"""
_FAILED = "UPDATE push_configs SET attempts = attempts + 1, next_at = :next_at WHERE task = :task AND id = :id"


class _OpenRow(NamedTuple):
    task: str
    id: str
    config: str
    notified: str
    attempts: int
    next_at: int
    state: TaskState
    last_at: int

    def to_open_config(self) -> OpenPushConfig:
        return OpenPushConfig(
            config=PushConfig(task=self.task, id=self.id, config=self.config),
            notified=self.notified,
            attempts=self.attempts,
            next_at=from_ms(self.next_at),
            state=self.state,
            last_at=from_ms(self.last_at),
        )


def put(db: Connection, uow: UnitOfWork, config: PushConfig) -> None:
    key = {"task": config.task, "id": config.id}
    if (row := db.execute(_SELECT_TASK, {"task": config.task}).fetchone()) is None:
        raise Refused("unknown_task", "there is no such task")
    if db.execute(_COUNT, key).fetchone()[0] >= MAX_CONFIGS:
        raise Refused("too_many_configs", f"a task has at most {MAX_CONFIGS} push notification configs: delete one")
    db.execute(_PUT, key | {"config": config.config, "notified": "working" if row[0] == "working" else ""})


def read(db: Connection, task: str) -> list[PushConfig]:
    return [PushConfig(task=row[0], id=row[1], config=row[2]) for row in db.execute(_SELECT, {"task": task})]


def delete(db: Connection, task: str, config_id: str) -> bool:
    return bool(db.execute(_DELETE, {"task": task, "id": config_id}).rowcount)


def read_open(db: Connection) -> list[OpenPushConfig]:
    return [_OpenRow._make(row).to_open_config() for row in db.execute(_SELECT_OPEN)]


def claim(db: Connection, seen: OpenPushConfig, until: int) -> bool:
    values = _key(seen) | {"until": until, "seen": to_ms(seen.next_at), "notified": seen.notified}
    return bool(db.execute(_CLAIM, values).rowcount)


def record(db: Connection, seen: OpenPushConfig, next_at: int | None) -> None:
    if next_at is None:
        db.execute(_SENT, _key(seen) | {"change": seen.change, "ended": int(seen.is_last)})
    else:
        db.execute(_FAILED, _key(seen) | {"next_at": next_at})


def _key(seen: OpenPushConfig) -> dict[str, str]:
    return {"task": seen.config.task, "id": seen.config.id}
