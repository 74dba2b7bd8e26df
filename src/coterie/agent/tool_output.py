"""What a tool returned, as text for the model: any value, of any size; what is too long is kept as an artifact."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from coterie.agent.tools import Tool, ToolContext, ToolResult, failed
from coterie.errors import CoterieError, Refused
from coterie.text import clean

HEAD, TAIL = 8 << 10, 4 << 10
"""Characters shown of what is longer."""
MAX_ERROR = 4_000


class NoResult(CoterieError):
    """A tool returned something that nothing can be made of."""


class Died(NoResult):
    """The process of a tool ended in the middle of the call."""


def encode(value: object) -> str | bytes | ToolResult:
    """Text and bytes as they are, all else as JSON; `NoResult` when it is none."""
    try:
        match value:
            case str() | ToolResult():
                return value
            case bytes() | bytearray() | memoryview():
                return bytes(value)
        return json.dumps(msgspec.to_builtins(value, str_keys=True), ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise NoResult("it returned something that contains itself, or is nested too deeply for JSON") from error
    except BaseException as error:  # the value is the owner's, and its own code may raise anything, SystemExit too
        words = message_of(error)
        what = "NaN or an infinity" if "float" in words else f"a {type(value).__name__} ({words})"
        raise NoResult(f"it returned {what}, which JSON cannot carry") from None


async def fit(tool: Tool, encoded: str | bytes | ToolResult, ctx: ToolContext) -> ToolResult:
    """As a result that a model can be shown, and every store can hold."""
    if isinstance(encoded, bytes):
        return await _fit_bytes(tool.name, encoded, ctx)
    result = encoded if isinstance(encoded, ToolResult) else ToolResult(ok=True, text=encoded)
    # An empty tool message is refused by some services.
    text = clean(result.text) or '""'
    if len(text) <= tool.max_text // 4 or len(data := text.encode()) <= tool.max_text:
        return replace(result, text=text)
    shown: dict[str, Any] = {"tooLong": True, "size": len(data), "head": text[:HEAD], "tail": text[-TAIL:]}
    try:
        artifact = await ctx.artifacts.put(data, f"{tool.name}.txt", key=ctx.idempotency_key)
    except (CoterieError, OSError) as error:
        return replace(_with(shown, {"notKept": clean(str(error))}, ok=result.ok), unknown=result.unknown)
    return replace(_with(shown, artifact.to_wire(), ok=result.ok), unknown=result.unknown)


def raised(name: str, error: BaseException) -> ToolResult:
    """What a model is told of an exception."""
    if isinstance(error, Refused) and hasattr(error, "code"):
        return failed(error.code, error.message)
    words, kind = message_of(error), type(error).__name__
    return failed("tool_failed", f"{name} failed: {clean(f'{kind}: {words}' if words else kind)[:MAX_ERROR]}")


def message_of(error: BaseException) -> str:
    """Its message; empty when the exception's own code fails. Such code may raise anything, SystemExit too."""
    try:
        return str(error)
    except BaseException:
        return ""


async def _fit_bytes(name: str, data: bytes, ctx: ToolContext) -> ToolResult:
    try:
        artifact = await ctx.artifacts.put(data, name, key=ctx.idempotency_key)
    except (CoterieError, OSError) as error:
        return failed("artifact_failed", f"{name} returned {len(data):,} bytes, which could not be kept: {error}")
    return _with({}, artifact.to_wire(), ok=True)


def _with(shown: Mapping[str, Any], more: Mapping[str, Any], *, ok: bool) -> ToolResult:
    text = json.dumps({**more, **shown}, ensure_ascii=False)
    return ToolResult(ok=ok, text=text, artifact_ref=more.get("artifactRef"))
