"""The HTTP side of `coterie serve`: bound before the society starts, opened once it runs, closed around its stop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from coterie.admin.inspect import owner
from coterie.cli.logs import debugging
from coterie.clock import SystemClock
from coterie.config import Address, Server, SocietyFolder, leave_address, read_config, take_address_back
from coterie.errors import CoterieError, StoreOwned
from coterie.society import Society
from coterie.supervision import Shutdown
from coterie.web.addresses import addresses, is_loopback
from coterie.web.app import build_app
from coterie.web.auth import Access, check_token, load_token, one_time_link
from coterie.web.server import WebServer, close, listen, port_of, raise_file_limit


class FrontDoor:
    def __init__(self, data: Path, sockets: Sequence[socket.socket], config: Server, host: str, token: str | None):
        self._data, self._sockets, self._token = data, sockets, token
        self.where = addresses(host, port_of(sockets), config.public_url, config.allowed_hosts)

    @classmethod
    def bound(cls, folder: Path, *, host: str | None, port: int | None, token: str | None) -> Self:
        """The port is ours from here on. What was not said is what the configuration says."""
        place, config = SocietyFolder(folder), read_config(folder).server
        host = config.host if host is None else host
        if token is None and not is_loopback(host):
            raise CoterieError(
                f"{host or 'every address'} can be reached from other machines, which needs a token that you choose:"
                " give one with --token or COTERIE_TOKEN, or listen on 127.0.0.1"
            )
        if token is not None:
            check_token(token, "--token or COTERIE_TOKEN")
        try:
            sockets = listen(host, config.port if port is None else port)
        except CoterieError:
            if pid := owner(place):  # most likely it is the one that has the port, too
                raise StoreOwned(folder, pid if pid > 0 else None) from None
            raise
        return cls(place.data, sockets, config, host, token)

    def shut(self) -> None:
        """For a society that never ran."""
        close(self._sockets)

    async def open(self, society: Society) -> None:
        """Requests are answered when it returns."""
        clock = SystemClock()
        token = load_token(self._data, self._token)
        self._access = Access(token, society.store.info.log_id, clock, secure=self.where.secure)
        self._app = build_app(society, self._access, where=self.where, clock=clock)
        raise_file_limit()
        self._server = WebServer(
            self._app,
            self._sockets,
            access_log=debugging(),
            clock=clock,
            trusted_proxies=society.config.server.trusted_proxies,
        )
        await self._server.start()
        leave_address(self._data, Address(url=self.where.local, pid=os.getpid(), token=self._token))

    def link(self) -> str:
        return one_time_link(self.where.url, self._access)

    @property
    def ended(self) -> asyncio.Future[Any]:
        """Done when nobody is served any more, wanted or not."""
        return self._server.ended

    async def close(self, society: Society) -> int:
        """Take no more requests, stop the society, let the last listeners know, close. How many went out early."""
        self._app.state.health.draining = True
        shutdown = Shutdown()
        await shutdown.step("remove the address", self._take_address_back)
        early = await shutdown.step("stop the society", lambda: society.stop(self._say_goodbye)) or 0
        await shutdown.step("stop the web server", self._server.stop)
        shutdown.finish()
        return early

    async def _take_address_back(self) -> None:
        take_address_back(self._data)

    async def _say_goodbye(self, early: int) -> None:
        shutdown = Shutdown()
        for last_words in self._app.state.on_shutdown:
            await shutdown.step("tell the listeners", partial(last_words, early))
        shutdown.finish()
