"""Push notifications of A2A: POSTs changed tasks to the addresses that programs gave and the owner allows.

Every process with a server does this; each change is claimed in the store first. A failed notification is sent again
with growing pauses, also after a restart.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import httpx

from coterie.clock import Clock
from coterie.errors import Lagged, StoreError
from coterie.push_configs import OpenPushConfig, is_allowed
from coterie.society import Society
from coterie.supervision import supervise

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0
CLAIM_TIME = timedelta(seconds=30)
MAX_ATTEMPTS = 12
FIRST_RETRY, MAX_RETRY = timedelta(seconds=1), timedelta(minutes=10)
CHECK_INTERVAL = timedelta(minutes=1)
"""How often a process looks for changes whose events it missed."""
MAX_AT_ONCE = 8
EVENT_BATCH = 100
RenderTask = Callable[[str], Awaitable[dict[str, Any] | None]]
"""From the id of a task to the body of a notification; None: the task was deleted."""


class PushSender:
    def __init__(self, society: Society, clock: Clock, render: RenderTask) -> None:
        self._society, self._clock, self._render = society, clock, render
        self._news = asyncio.Event()
        self._has_open = True
        """False: this process knows of no open config, so events need no look at the store."""
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._running = asyncio.create_task(
            supervise("push notifications", self._run, self._clock), name="coterie-push"
        )  # fmt: skip

    async def shut_down(self, _: int = 0) -> None:
        if self._running:
            self._running.cancel()
            await asyncio.wait({self._running})

    def notify(self) -> None:
        """Look for changes now: a config was added."""
        self._has_open = True
        self._news.set()

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, follow_redirects=False, trust_env=False) as http:
            watching = asyncio.create_task(self._watch(), name="coterie-push-watch")
            try:
                while True:
                    self._news.clear()
                    await self._clock.wait(self._news, await self._send_due(http))
            finally:
                watching.cancel()
                await asyncio.wait({watching})

    async def _watch(self) -> None:
        while True:
            async with self._society.bus.watch() as watcher:
                try:
                    while True:
                        await watcher.batch(EVENT_BATCH)
                        if self._has_open:
                            self._news.set()
                except Lagged:
                    self._news.set()
                except StopAsyncIteration:
                    return

    async def _send_due(self, http: httpx.AsyncClient) -> timedelta:
        """Send all notifications that are due. Returns the time until the next look."""
        now, store = self._clock.now(), self._society.store
        found = await store.open_push_configs()
        self._has_open = bool(found)
        changed = [one for one in found if one.change != one.notified]
        due = [one for one in changed if one.next_at <= now][:MAX_AT_ONCE]
        results = await asyncio.gather(*(self._notify_once(http, one) for one in due), return_exceptions=True)
        if failed := [result for result in results if isinstance(result, BaseException)]:
            raise failed[0]  # after the others have been sent
        later = [one.next_at - now for one in changed if one.next_at > now]
        return timedelta(0) if due else min([CHECK_INTERVAL, *later])

    async def _notify_once(self, http: httpx.AsyncClient, seen: OpenPushConfig) -> None:
        store = self._society.store
        if not await store.claim_push_config(seen, self._clock.now() + CLAIM_TIME):
            return
        config = json.loads(seen.config.config)
        problem = await self._post(http, config, seen.config.task)
        if problem and seen.attempts + 1 < MAX_ATTEMPTS:
            pause = min(MAX_RETRY, FIRST_RETRY * (1 << seen.attempts))
            log.info("a push notification about task %s is sent again in %s: %s", seen.config.task, pause, problem)
            await store.record_push(seen, next_at=self._clock.now() + pause)
            return
        if problem:
            log.warning("a push notification about task %s is given up: %s", seen.config.task, problem)
        await store.record_push(seen, next_at=None)

    async def _post(self, http: httpx.AsyncClient, config: dict[str, Any], task_id: str) -> str | None:
        """Send the notification. Returns what went wrong; None: nothing, or it must not be sent."""
        url = str(config.get("url", ""))
        if not is_allowed(url, self._society.config.doors.push):
            log.warning("a push notification about task %s is not sent: doors.push does not allow its address", task_id)
            return None
        try:
            body = await self._render(task_id)
        except StoreError:
            raise
        except Exception:  # it must not be tried for ever: each try counts
            log.exception("the push notification about task %s cannot be rendered", task_id)
            return "the task cannot be rendered"
        if body is None:
            return None
        headers = {"X-A2A-Notification-Token": str(config["token"])} if config.get("token") else {}
        authentication = config.get("authentication") or {}
        if authentication.get("scheme") and authentication.get("credentials"):
            headers["Authorization"] = f"{authentication['scheme']} {authentication['credentials']}"
        try:
            # The answer is not read: only its status counts.
            async with http.stream("POST", url, json=body, headers=headers) as response:
                return None if response.is_success else f"the address answered with status {response.status_code}"
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return f"{type(error).__name__}: the address cannot be reached"
