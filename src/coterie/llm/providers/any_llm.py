"""A model behind a vendor's own API, by way of any-llm: the extra `coterie[providers]`."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from coterie.clock import Clock, SystemClock
from coterie.llm.providers import errors
from coterie.llm.providers.deadlines import Deadlines, Late, Watch
from coterie.llm.providers.errors import Asked
from coterie.llm.providers.openai import Dialect, call_ids, carried, names
from coterie.llm.providers.openai_stream import Assembly, Reading, read_answer
from coterie.llm.service import ServiceError
from coterie.llm.types import Answer, Delta, Request

MAX_BYTES = 16_000_000
_TWO_MINUTES = Deadlines.within(timedelta(minutes=2))
_STATUS = {
    "AuthenticationError": 401,
    "MissingApiKeyError": 401,
    "RateLimitError": 429,
    "InvalidRequestError": 400,
    "UnsupportedParameterError": 400,
    "UnsupportedProviderError": 400,
    "ContentFilterError": 400,
    "ContextLengthExceededError": 413,
    "ModelNotFoundError": 404,
}
"""What an error of any-llm means where the vendor gave no status."""


class AnyLLMService:
    """One model of one of any-llm's providers. They answer in the shape of chat completions, and are read as one."""

    def __init__(
        self,
        *,
        id: str,  # noqa: A002
        provider: str,
        model: str,
        base_url: str = "",
        api_key: str = "",
        key_name: str = "",
        deadlines: Deadlines = _TWO_MINUTES,
        max_tokens: int | None = None,
        max_bytes: int = MAX_BYTES,
        clock: Clock | None = None,
    ) -> None:
        """`base_url` empty: the vendor's own."""
        self._id, self._provider, self._model, self._base_url = id, provider, model, base_url
        self._key = api_key.strip()
        address = base_url or provider
        self._asked = Asked(service=id, address=address, model=model, key=self._key, key_name=key_name)
        self.deadlines = deadlines
        self._max_tokens, self._max_bytes = max_tokens, max_bytes
        self._clock = clock or SystemClock()
        self._vendor: Any = None
        self._making = asyncio.Lock()

    @property
    def id(self) -> str:
        return self._id

    async def generate(self, request: Request) -> AsyncIterator[Delta | Answer]:
        asked = replace(self._asked, carried=carried(request))
        assembly = Assembly(taken_ids=call_ids(request), names=names(request.tools))
        reading = Reading(asked, assembly, self._clock.now())
        vendor = await self._ready(asked)
        with Watch(self.deadlines) as watch:
            chunks = await self._ask(vendor, request, asked, watch)
            body = _Chunks(chunks, self, asked, watch, self._max_bytes)
            async with aclosing(body), aclosing(read_answer(body, reading)) as pieces:
                async for piece in pieces:
                    yield piece

    async def close(self) -> None:
        vendor, self._vendor = self._vendor, None
        client = getattr(vendor, "client", None)
        if close := getattr(client, "close", None) or getattr(client, "aclose", None):
            await close()

    def failure(self, asked: Asked, error: Exception) -> ServiceError:
        """What an error from inside any-llm is to us."""
        if isinstance(error, Late):
            return errors.late(asked, error)
        status = getattr(error, "status_code", None) or _STATUS.get(type(error).__name__)
        original = getattr(error, "original_exception", None) or error
        if status and status >= 300:
            told = {key: getattr(error, key, None) for key in ("message", "code", "param", "error_type")}
            said = {**told, "message": told["message"] or str(error)}
            retry_after = getattr(error, "retry_after", None)
            return errors.failure(asked, errors.complaint(status, said, retry_after), self._clock.now())
        if isinstance(original, ValueError | RecursionError | AttributeError | TypeError):
            return errors.malformed(asked, "it is no JSON of the shape it should have")
        return errors.unreachable(asked, original)

    async def _ready(self, asked: Asked) -> Any:
        """The vendor's client. Its libraries take seconds to import, and nobody else waits for that."""
        async with self._making:
            self._vendor = self._vendor or await asyncio.to_thread(self._connect, asked)
            return self._vendor

    async def _ask(self, vendor: Any, request: Request, asked: Asked, watch: Watch) -> Any:
        body = Dialect().body(request, self._model, self._max_tokens, stream=True)
        try:
            return await watch.first(lambda: vendor.acompletion(**body))
        except Exception as error:
            # Whatever a vendor's SDK raises: this is the one place where it becomes an error of ours.
            raise self.failure(asked, error) from None

    def _connect(self, asked: Asked) -> Any:
        try:
            library = importlib.import_module("any_llm")
        except ImportError:
            raise errors.not_installed(asked, self._provider, "coterie[providers]") from None
        given = {"api_key": self._key or None, "api_base": self._base_url or None, "unified_exceptions": True}
        try:
            with suppress(library.exceptions.UnsupportedParameterError):
                # Retries are the caller's; a vendor whose SDK cannot be told so is still better than none.
                return library.AnyLLM.create(self._provider, **given, max_retries=0)
            return library.AnyLLM.create(self._provider, **given)
        except ImportError:
            raise errors.not_installed(asked, self._provider, f"any-llm-sdk[{self._provider}]") from None
        except Exception as error:
            raise self.failure(asked, error) from None


class _Chunks:
    """The chunks of any-llm as the bytes of a stream."""

    def __init__(self, chunks: Any, service: AnyLLMService, asked: Asked, watch: Watch, cap: int) -> None:
        self._chunks, self._service, self._asked, self._watch, self._left = chunks, service, asked, watch, cap
        self._wait = watch.first

    async def read(self) -> bytes:
        try:
            chunk = await self._wait(self._chunks.__anext__)
        except StopAsyncIteration:
            return b""
        except Exception as error:
            raise self._service.failure(self._asked, error) from None
        self._wait = self._watch.next
        event = f"data: {json.dumps(chunk.model_dump())}\n\n".encode()
        self._left -= len(event)
        if self._left < 0:
            raise errors.malformed(self._asked, "it is far too large")
        return event

    async def finish(self) -> None:
        with suppress(Exception):
            await self._watch.soon(self._chunks.__anext__)

    async def aclose(self) -> None:
        if close := getattr(self._chunks, "aclose", None):
            await close()
