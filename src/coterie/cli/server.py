"""A society run as a process: its HTTP server, its announcement, its stop by signals or by a failing disk."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Self

import typer

from coterie import __version__
from coterie.admin.inspect import Inspection
from coterie.cli.logs import is_debugging
from coterie.cli.output import count_of, escape_controls, print_line
from coterie.clock import SystemClock
from coterie.config import (
    STORE_VARIABLE,
    ServerAddress,
    ServerSettings,
    SocietyFolder,
    read_config,
    remove_address,
    write_address,
)
from coterie.configuration import FilesRole
from coterie.errors import CoterieError, StoreError, StoreOwned, StoreUnusable
from coterie.llm.config import REMOTE_AGENT
from coterie.messages import PERSON
from coterie.society import Society
from coterie.store import Page
from coterie.store_url import redact_url
from coterie.stores.open import is_shared, owner_pid, require_society
from coterie.supervision import Shutdown
from coterie.tour import script
from coterie.web.addresses import addresses, is_loopback
from coterie.web.app import build_app
from coterie.web.auth import Access, check_token, load_token, one_time_link
from coterie.web.server import WebServer, close, listen, port_of, raise_file_limit

log = logging.getLogger(__name__)

PROGRESS_INTERVAL = timedelta(seconds=1)
FORCED_EXIT_SECONDS = 0.5
"""How long a forced exit waits for running writes."""
LISTED_AGENTS = 10
GREETING_ID = "tour greeting"
"""Client id of the greeting: sent again at the next start, it is the same message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `coterie serve`. None: as the configuration says."""

    folder: Path
    host: str | None = None
    port: int | None = None
    token: str | None = field(default=None, repr=False)
    run_turns: bool = True
    """False: other processes run all turns."""
    max_turns: int | None = None


class SocietyServer:
    """The HTTP server of one society. The port is bound before the society starts."""

    def __init__(self, sockets: Sequence[socket.socket], config: ServerSettings) -> None:
        self._sockets = sockets
        self.addresses = addresses(config.host, port_of(sockets), config.public_url, config.allowed_hosts)

    @classmethod
    def bind(cls, config: ServerSettings, token: str | None) -> Self:
        """Listen on the configured address. Anything but loopback needs a token that the owner chose."""
        if token is None and not is_loopback(config.host):
            raise CoterieError(
                f"{config.host or 'every address'} can be reached from other machines, which needs a token that you"
                " choose: give one with --token or COTERIE_TOKEN, or listen on 127.0.0.1"
            )
        if token is not None:
            check_token(token, "--token or COTERIE_TOKEN")
        return cls(listen(config.host, config.port), config)

    async def start(self, society: Society, token: str) -> None:
        """Answer requests from now on."""
        clock = SystemClock()
        self._access = Access(token, society.store.info.log_id, clock, secure=self.addresses.secure)
        self._app = build_app(society, self._access, where=self.addresses, clock=clock)
        self._server = WebServer(
            self._app,
            self._sockets,
            access_log=is_debugging(),
            clock=clock,
            trusted_proxies=society.config.server.trusted_proxies,
        )
        await self._server.start()
        self._app.state.a2a.push.start()

    def login_link(self) -> str:
        return one_time_link(self.addresses.url, self._access)

    @property
    def ended(self) -> asyncio.Future[Any]:
        """Done when requests are no longer answered, whether by `stop` or by a failure."""
        return self._server.ended

    def refuse_requests(self) -> None:
        """Answer every further request with 503 `stopping`."""
        self._app.state.health.draining = True

    async def end_streams(self, delivered_early: int = 0) -> None:
        """Send the event streams their last event and end them."""
        shutdown = Shutdown()
        for callback in self._app.state.on_shutdown:
            await shutdown.step("end the event streams", partial(callback, delivered_early))
        shutdown.finish()

    async def stop(self) -> None:
        await self._server.stop()

    def close(self) -> None:
        """Release the port of a server that was not started."""
        close(self._sockets)


async def run_server(options: ServeOptions) -> int:
    """Run the society and its server until a signal, and return the exit code."""
    signals = StopSignals()
    folder = SocietyFolder(options.folder)
    is_new = not folder.exists
    server = _bind(folder, options)
    try:
        society = await _start_society(folder.path, signals, run_turns=options.run_turns, max_turns=options.max_turns)
    except BaseException:
        server.close()
        raise
    try:
        raise_file_limit()
        await server.start(society, load_token(folder.data, options.token))
        write_address(folder.data, ServerAddress(url=server.addresses.local, pid=os.getpid(), token=options.token))
    except BaseException:
        await society.abandon()
        raise
    try:
        if not signals.stop.done():
            await greet(society)
            await _announce(society, folder.path, is_new, server)
            gc.freeze()  # modules and settings stay for ever: later collections need not visit them
            await _wait_for_first(signals.stop, society.broken, server.ended)
    except BaseException:  # such as a closed standard output: the society is still stopped in order
        await _stop(society, stop_server(server, society, folder), folder.path, signals)
        raise
    if society.broken.done():
        _exit_broken(society)
    return await _stop(society, stop_server(server, society, folder), folder.path, signals)


def _bind(folder: SocietyFolder, options: ServeOptions) -> SocietyServer:
    config = read_config(folder.path).server
    config = ServerSettings(
        host=config.host if options.host is None else options.host,
        port=config.port if options.port is None else options.port,
        public_url=config.public_url,
        allowed_hosts=config.allowed_hosts,
    )
    try:
        return SocietyServer.bind(config, options.token)
    except CoterieError as error:
        # A process that runs this society most likely has the port, too.
        if isinstance(error.__cause__, OSError) and (pid := owner_pid(folder)):
            raise StoreOwned(folder.path, pid if pid > 0 else None) from None
        raise


async def stop_server(server: SocietyServer, society: Society, folder: SocietyFolder) -> int:
    """Refuse requests, stop the society, then the server. Return how many delayed messages were delivered early."""
    server.refuse_requests()
    shutdown = Shutdown()
    await shutdown.step("remove the address", partial(asyncio.to_thread, remove_address, folder.data))
    early = await shutdown.step("stop the society", lambda: society.stop(server.end_streams)) or 0
    await shutdown.step("stop the web server", server.stop)
    shutdown.finish()
    return early


@contextmanager
def worker_folder(folder: Path) -> Iterator[Path]:
    """The folder of a worker: `folder`, or an empty one if that has no society and the environment names the store."""
    if SocietyFolder(folder).exists or not os.environ.get(STORE_VARIABLE):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="coterie-worker-") as empty:
        (Path(empty) / "data").mkdir(mode=0o700)
        yield Path(empty)


async def run_worker(folder: Path, max_turns: int | None = None) -> int:
    """Run the agents of a shared society without an HTTP server until a signal, and return the exit code."""
    signals = StopSignals()
    config = read_config(require_society(folder).path)
    if not is_shared(config):
        raise StoreUnusable(
            "a worker shares its society with other processes, which needs a PostgreSQL: set store.url in coterie.toml"
            f" or {STORE_VARIABLE} in the environment, or run coterie serve"
        )
    society = await _start_society(folder, signals, files="never", max_turns=max_turns)
    try:
        if not signals.stop.done():
            info, version = society.store.info, society.configuration.settings.version
            print_line(f"Coterie {__version__} works for the society in {redact_url(config.store.url)}")
            print_line(f"  store    {info.engine} {info.version}")
            print_line(f"  agents   {_list_agents(society)} (configuration version {version})")
            print_line(f"  models   {_list_models(society)}")
            print_line(f"Ready. Stop it with Ctrl-C or: kill {os.getpid()}")
            sys.stdout.flush()
            gc.freeze()  # as `run_server` does
            await _wait_for_first(signals.stop, society.broken)
    except BaseException:
        await _stop(society, society.stop(), folder, signals)
        raise
    if society.broken.done():
        _exit_broken(society)
    return await _stop(society, society.stop(), folder, signals)


class StopSignals:
    """SIGINT and SIGTERM: the first asks to stop, the second to exit at once."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.stop: asyncio.Future[None] = loop.create_future()
        self.exit_now: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        future = self.exit_now if self.stop.done() else self.stop
        if not future.done():
            future.set_result(None)


async def _start_society(
    folder: Path,
    signals: StopSignals,
    files: FilesRole = "write",
    *,
    run_turns: bool = True,
    max_turns: int | None = None,
) -> Society:
    starting = asyncio.create_task(Society.start(folder, files=files, run_turns=run_turns, max_turns=max_turns))
    await _wait_for_first(starting, signals.exit_now)
    if not starting.done():
        await _force_exit(starting, folder)
    return starting.result()


async def _wait_for_first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


async def greet(society: Society, environ: Mapping[str, str] = os.environ) -> None:
    """Let the guide of the tour speak first, if no model is set up and no message was ever sent."""
    if not society.config.agents or any(entry.provider not in ("tour", REMOTE_AGENT) for entry in society.services):
        return
    if await society.store.messages(Page(limit=1)):
        return
    language = next(filter(None, map(environ.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    chinese = language.lower().startswith("zh")
    options = [scene.option.text(chinese) for scene in (*script.SCENES, script.LANGUAGE)]
    # A page shows the text in the language of its browser, which is not known before the page is opened.
    payload = {"text": script.WELCOME.then.text(chinese), "translations": script.welcome_translations()}
    guide = society.config.agents[0].id
    await society.bus.send(sender=guide, to=PERSON, payload=payload, quick_replies=options, client_id=GREETING_ID)


async def _announce(society: Society, folder: Path, is_new: bool, server: SocietyServer) -> None:
    info, delayed = society.store.info, await society.bus.delayed_count()
    kept = society.config.shutdown.delayed == "keep"
    lines = [
        "Coterie is ready. Open this link in your browser:",
        "",
        f"  {server.login_link()}",
        "",
        "The link works once, within ten minutes. For another one: coterie open",
        f"To stop Coterie, press Ctrl-C here, or run: kill {os.getpid()}",
        "",
        *([f"Created {folder} with commented templates: coterie.toml, llmservices.json, tools.py."] if is_new else []),
        f"Coterie {__version__} runs the society in {folder}",
        f"  store    {info.engine} {info.version}, durability {society.config.store.durability}",
        f"  agents   {_list_agents(society)}",
        f"  models   {_list_models(society)}",
        f"  delayed  {count_of(delayed, 'message')} ({'kept' if kept else 'delivered early'} on a stop)",
        f"  listens  {server.addresses.url}",
        "Ready.",
    ]
    typer.echo("\n".join(map(escape_controls, lines)))
    sys.stdout.flush()


def _list_agents(society: Society) -> str:
    agents = [agent.id for agent in society.agents.all_profiles()]
    more = f" and {len(agents) - LISTED_AGENTS:,} more" if len(agents) > LISTED_AGENTS else ""
    return ", ".join(agents[:LISTED_AGENTS]) + more or "none yet: run coterie serve or coterie apply"


def _list_models(society: Society) -> str:
    if all(entry.provider in ("tour", REMOTE_AGENT) for entry in society.services):
        return "none yet: a scripted tour answers; name yours in llmservices.json"
    return ", ".join(entry.id for entry in society.services)


async def _stop(society: Society, stopping: Coroutine[Any, Any, int], folder: Path, signals: StopSignals) -> int:
    log.info("stopping; a second signal ends it at once")
    task = asyncio.create_task(stopping)
    progress = asyncio.create_task(_log_progress(society))
    await _wait_for_first(task, signals.exit_now, society.broken)
    progress.cancel()
    if task.done():
        early = task.result()
        log.info("stopped%s", f"; {count_of(early, 'delayed message')} delivered early" if early else "")
        return 0
    if society.broken.done():
        _exit_broken(society)
    return await _force_exit(task, folder)


async def _log_progress(society: Society) -> None:
    clock = SystemClock()
    with suppress(StoreError, RuntimeError):  # the store is closed meanwhile
        while True:
            await clock.sleep(PROGRESS_INTERVAL)
            log.info("stopping: %d delayed messages left to deliver", await society.bus.delayed_count())


async def _force_exit(busy: asyncio.Task[Any], folder: Path) -> NoReturn:
    busy.cancel()
    await asyncio.wait({busy}, timeout=FORCED_EXIT_SECONDS)
    left = "an unknown number of"
    # Read through a new connection: the society's own may be closed, or hang.
    with suppress(StoreError, TimeoutError):
        async with asyncio.timeout(FORCED_EXIT_SECONDS / 2), Inspection.open(folder) as stored:
            left = f"{await stored.store.delayed_count()}"
    log.warning("forced exit: %s delayed messages were not delivered; they stay scheduled", left)
    _exit()


def _exit_broken(society: Society) -> NoReturn:
    log.critical("%s", society.broken.result())
    _exit()


def _exit() -> NoReturn:
    """End the process without waiting for the disk. What was acknowledged is stored."""
    logging.shutdown()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(1)
