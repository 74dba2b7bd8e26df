"""Service provider for vendors' own APIs through any-llm (extra `coterie[providers]`)."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import msgspec

from coterie.clock import Clock, SystemClock
from coterie.llm.providers import errors
from coterie.llm.providers.errors import RequestContext
from coterie.llm.providers.openai import Dialect, call_ids, capabilities_sent, file_types_sent, names_by_api_name
from coterie.llm.providers.openai_stream import CompletionBuilder, ResponseReader, stream_completion
from coterie.llm.service import (
    DEFAULT_SAMPLING,
    DEFAULT_TIMEOUT,
    Completion,
    DeadlineExceeded,
    Deadlines,
    DeadlineTimer,
    ModelRequest,
    Sampling,
    ServiceError,
    TextDelta,
)

MAX_RESPONSE_BYTES = 16_000_000
_DEFAULT_DEADLINES = Deadlines.from_timeout(DEFAULT_TIMEOUT)
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
"""Status of an any-llm error without a status of its own."""


class AnyLLMService:
    """One model of an any-llm provider. any-llm returns chat completion chunks, which are read like OpenAI's."""

    def __init__(
        self,
        *,
        id: str,  # noqa: A002
        provider: str,
        model: str,
        base_url: str = "",
        api_key: str = "",
        key_name: str = "",
        deadlines: Deadlines = _DEFAULT_DEADLINES,
        sampling: Sampling = DEFAULT_SAMPLING,
        headers: Mapping[str, str] | None = None,
        secrets: Iterable[str] = (),
        max_bytes: int = MAX_RESPONSE_BYTES,
        clock: Clock | None = None,
    ) -> None:
        """`base_url` empty: the vendor's default."""
        self._id, self._provider, self._model, self._base_url = id, provider, model, base_url
        self._key = api_key.strip()
        self._context = RequestContext(
            service=id,
            address=base_url or provider,
            model=model,
            key=self._key,
            key_name=key_name,
            secrets=tuple(secrets),
        )
        self.deadlines = deadlines
        self._sampling, self._headers, self._max_bytes = sampling, dict(headers or {}), max_bytes
        self._clock = clock or SystemClock()
        self._client: Any = None
        self._client_lock = asyncio.Lock()

    @property
    def id(self) -> str:
        return self._id

    async def generate(self, request: ModelRequest) -> AsyncIterator[TextDelta | Completion]:
        context = replace(self._context, capabilities=capabilities_sent(request), file_types=file_types_sent(request))
        builder = CompletionBuilder(taken_ids=call_ids(request), tool_names=names_by_api_name(request.tools))
        reader = ResponseReader(context, builder, self._clock.now())
        async with self._client_lock:
            # In a thread: importing a vendor's library takes seconds.
            client = self._client = self._client or await asyncio.to_thread(self._create_client, context)
        with DeadlineTimer(self.deadlines) as timer:
            chunks = await self._send(client, request, context, timer)
            body = _ChunkBody(chunks, self, context, timer, self._max_bytes)
            async with aclosing(body), aclosing(stream_completion(body, reader)) as pieces:
                async for piece in pieces:
                    yield piece

    async def close(self) -> None:
        vendor, self._client = self._client, None
        client = getattr(vendor, "client", None)
        if close := getattr(client, "close", None) or getattr(client, "aclose", None):
            await close()

    def to_service_error(self, context: RequestContext, error: Exception) -> ServiceError:
        """Convert an error of any-llm or of a vendor's library."""
        if isinstance(error, DeadlineExceeded):
            return errors.timed_out(context, error)
        status = getattr(error, "status_code", None) or _STATUS.get(type(error).__name__)
        original = getattr(error, "original_exception", None) or error
        if status and status >= 300:
            body = {key: getattr(error, key, None) for key in ("message", "code", "param", "error_type")}
            body["message"] = body["message"] or str(error)
            if type(error).__name__ == "ContextLengthExceededError":
                body["code"] = body["code"] or "context_length_exceeded"  # 413 alone may mean a file
            response = errors.parse_error_body(status, body, getattr(error, "retry_after", None))
            return errors.classify(context, response, self._clock.now())
        if isinstance(original, ValueError | RecursionError | AttributeError | TypeError):
            return errors.malformed(context, "it is no JSON of the expected form")
        return errors.unreachable(context, original)

    async def _send(self, client: Any, request: ModelRequest, context: RequestContext, timer: DeadlineTimer) -> Any:
        # The vendors' libraries take other fields and headers as separate arguments.
        chosen = self._sampling.override_with(request.sampling)
        request = msgspec.structs.replace(request, sampling=replace(chosen, extra_body=""))
        body = Dialect().body(request, self._model, None, stream=True)
        if extra := chosen.extra_fields():
            body["extra_body"] = extra
        if self._headers:
            body["extra_headers"] = self._headers
        try:
            return await timer.await_first(lambda: client.acompletion(**body))
        except Exception as error:  # a vendor's library may raise anything
            raise self.to_service_error(context, error) from None

    def _create_client(self, context: RequestContext) -> Any:
        try:
            library = importlib.import_module("any_llm")
        except ImportError:
            raise errors.package_missing(context, self._provider, "coterie[providers]") from None
        options = {"api_key": self._key or None, "api_base": self._base_url or None, "unified_exceptions": True}
        try:
            with suppress(library.exceptions.UnsupportedParameterError):
                # Retries are the caller's task; a vendor's library without this option is used all the same.
                return library.AnyLLM.create(self._provider, **options, max_retries=0)
            return library.AnyLLM.create(self._provider, **options)
        except ImportError:
            raise errors.package_missing(context, self._provider, f"any-llm-sdk[{self._provider}]") from None
        except Exception as error:
            raise self.to_service_error(context, error) from None


class _ChunkBody:
    """Serializes any-llm's chunks as the bytes of an event stream, with deadlines and a size limit."""

    def __init__(
        self, chunks: Any, service: AnyLLMService, context: RequestContext, timer: DeadlineTimer, limit: int
    ) -> None:
        self._chunks, self._service, self._context = chunks, service, context
        self._timer, self._left = timer, limit
        self._wait = timer.await_first

    async def read(self) -> bytes:
        try:
            chunk = await self._wait(self._chunks.__anext__)
        except StopAsyncIteration:
            return b""
        except Exception as error:
            raise self._service.to_service_error(self._context, error) from None
        self._wait = self._timer.await_next
        event = f"data: {json.dumps(chunk.model_dump())}\n\n".encode()
        self._left -= len(event)
        if self._left < 0:
            raise errors.malformed(self._context, "it is far too large")
        return event

    async def finish(self) -> None:
        with suppress(Exception):
            await self._timer.await_end(self._chunks.__anext__)

    async def aclose(self) -> None:
        if close := getattr(self._chunks, "aclose", None):
            await close()
