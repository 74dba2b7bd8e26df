"""A model behind an OpenAI-compatible chat completions endpoint."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache
from urllib.parse import urlsplit

import httpx
import msgspec

from coterie.clock import Clock, SystemClock
from coterie.llm.chat import Answer, Delta, Request
from coterie.llm.providers import outcomes
from coterie.llm.providers.assembly import Assembly, decode
from coterie.llm.providers.deadlines import Deadlines, Late, Watch
from coterie.llm.providers.openai_dialect import Dialect, call_ids, carried, names
from coterie.llm.providers.outcomes import Asked, Complaint
from coterie.llm.providers.reading import Reading, read_answer
from coterie.llm.providers.sockets import use_asyncio
from coterie.llm.service import ServiceError

MAX_BYTES = 16_000_000
_MAX_COMPLAINT = 64_000
_COMPLAINT_SECONDS = 1.0
"""For the text of a refusal. The status alone is enough to act on, and a fallback may wait."""
_TWO_MINUTES = Deadlines.within(timedelta(minutes=2))


class OpenAIService:
    """One model at one address, asked by `POST {base_url}/chat/completions`."""

    def __init__(
        self,
        *,
        id: str,  # noqa: A002
        base_url: str,
        model: str,
        api_key: str = "",
        key_name: str = "",
        deadlines: Deadlines = _TWO_MINUTES,
        max_tokens: int | None = None,
        max_bytes: int = MAX_BYTES,
        stream: bool = True,
        clock: Clock | None = None,
    ) -> None:
        """`key_name` is the environment variable that `api_key` came from: an error about the key tells it."""
        self._id, self._model = id, model
        path, mark, query = base_url.partition("?")
        self._url = f"{path.rstrip('/')}/chat/completions{mark}{query}"
        self._key = api_key.strip()
        self._asked = Asked(service=id, address=_shown(base_url), model=model, key=self._key, key_name=key_name)
        self.deadlines = deadlines
        self._max_tokens, self._max_bytes, self._stream = max_tokens, max_bytes, stream
        self._clock = clock or SystemClock()
        self._dialect = Dialect()
        self._client: httpx.AsyncClient | None = None

    @property
    def id(self) -> str:
        return self._id

    async def generate(self, request: Request) -> AsyncIterator[Delta | Answer]:
        asked = replace(self._asked, carried=carried(request))
        assembly = Assembly(taken_ids=call_ids(request), names=names(request.tools))
        reading = Reading(asked, assembly, self._clock.now())
        with Watch(self.deadlines) as watch:
            body = _Body(await self._ask(request, asked, watch), asked, watch, self._max_bytes)
            async with aclosing(body), aclosing(read_answer(body, reading)) as pieces:
                async for piece in pieces:
                    yield piece

    async def close(self) -> None:
        client, self._client = self._client, None
        if client:
            await client.aclose()

    async def _ask(self, request: Request, asked: Asked, watch: Watch) -> httpx.Response:
        """The response that holds the answer. Asks again only when the service said how it wants to be asked."""
        while True:
            dialect = self._dialect
            body = dialect.body(request, self._model, self._max_tokens, stream=self._stream)
            response = await self._post(msgspec.json.encode(body), asked, watch)
            if response.is_success:
                return response
            said = await _complaint(response, asked, watch)
            learnt = dialect.after(said.text)
            if learnt == dialect or said.status not in (400, 422, 500):
                raise outcomes.failure(asked, said, self._clock.now())
            self._dialect = learnt

    async def _post(self, body: bytes, asked: Asked, watch: Watch) -> httpx.Response:
        if not re.fullmatch(r"[!-~]*", self._key):
            raise outcomes.unusable_key(asked)
        self._client = self._client or self._connect()
        client = self._client
        try:
            request = client.build_request("POST", self._url, content=body)
            return await watch.first(lambda: client.send(request, stream=True))
        except Late as error:
            raise outcomes.late(asked, error) from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
            raise outcomes.unusable_address(asked) from error
        except httpx.HTTPError as error:
            raise outcomes.unreachable(asked, error) from error

    def _connect(self) -> httpx.AsyncClient:
        # Compressed answers could unfold to any size between two looks at the cap, so none are asked for.
        headers = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "coterie"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        timeout = httpx.Timeout(None, connect=self.deadlines.connect.total_seconds())
        # How many requests run at once is decided before they come here.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        client = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, verify=_trusted())
        use_asyncio(client)
        return client


class _Body:
    """The bytes of a response, within deadlines and cap."""

    def __init__(self, response: httpx.Response, asked: Asked, watch: Watch, cap: int) -> None:
        self._response, self._asked, self._watch, self._left = response, asked, watch, cap
        # The stream itself and not `aiter_raw`: the layers between cost a tenth of reading a token.
        self._pieces = aiter(response.stream)  # type: ignore[arg-type]
        self._wait = watch.first

    async def read(self) -> bytes:
        """The next bytes; none at the end."""
        try:
            chunk = await self._wait(self._pieces.__anext__)
        except StopAsyncIteration:
            return b""
        except Late as error:
            raise outcomes.late(self._asked, error) from None
        except httpx.HTTPError as error:
            raise outcomes.cut(self._asked) from error
        self._wait = self._watch.next
        self._left -= len(chunk)
        if self._left < 0:
            raise outcomes.malformed(self._asked, "it is far too large")
        return chunk

    async def finish(self) -> None:
        """Sees the end of a response that has nothing more to say, so that its connection can serve again."""
        with suppress(StopAsyncIteration, Late, httpx.HTTPError):
            await self._watch.soon(self._pieces.__anext__)

    async def aclose(self) -> None:
        await self._response.aclose()


async def _complaint(response: httpx.Response, asked: Asked, watch: Watch) -> Complaint:
    data = bytearray()
    # What a service adds to its refusal is welcome, but the refusal stands without it.
    with suppress(ServiceError, TimeoutError):
        async with asyncio.timeout(_COMPLAINT_SECONDS), aclosing(_Body(response, asked, watch, _MAX_COMPLAINT)) as body:
            while chunk := await body.read():
                data += chunk
    try:
        said = decode(bytes(data))
    except ValueError:
        said = data.decode("utf-8", "replace")
    return outcomes.complaint(response.status_code, said, response.headers.get("retry-after"))


def _shown(url: str) -> str:
    """The address without what may be secret in it."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.scheme else url


@cache
def _trusted() -> ssl.SSLContext:
    """Made once: reading the certificates takes longer than most answers' first byte."""
    return httpx.create_ssl_context()
