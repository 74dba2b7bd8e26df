"""Converts return values and exceptions of tools to results for the model. Long results become artifacts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from coterie.agent.tools import Tool, ToolContext, ToolResult, error_result
from coterie.errors import CoterieError, Refused
from coterie.text import to_storable

HEAD_CHARACTERS, TAIL_CHARACTERS = 8 << 10, 4 << 10
"""Parts of a long result that the model sees."""
MAX_ERROR_CHARACTERS = 4_000


class NoToolResult(CoterieError):
    """A tool returned a value that cannot be encoded."""


class ToolProcessDied(NoToolResult):
    """The process of a tool ended during the call."""


def encode_result(value: object) -> str | bytes | ToolResult:
    """Return text and bytes unchanged, other values as JSON. `NoToolResult`: JSON cannot represent the value."""
    try:
        match value:
            case str() | ToolResult():
                return value
            case bytes() | bytearray() | memoryview():
                return bytes(value)
        return json.dumps(msgspec.to_builtins(value, str_keys=True), ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise NoToolResult("it returned something that contains itself, or is nested too deeply for JSON") from error
    except BaseException as error:  # the value's class is user code, which may raise even SystemExit
        message = safe_message(error)
        what = "NaN or an infinity" if "float" in message else f"a {type(value).__name__} ({message})"
        raise NoToolResult(f"it returned {what}, which JSON cannot represent") from None


async def fit_result(tool: Tool, encoded: str | bytes | ToolResult, ctx: ToolContext) -> ToolResult:
    """Return a result of bounded, storable text; the whole of a long text becomes an artifact."""
    if isinstance(encoded, bytes):
        return await _fit_bytes(tool.name, encoded, ctx)
    result = encoded if isinstance(encoded, ToolResult) else ToolResult(ok=True, text=encoded)
    # Some services reject an empty tool message.
    text = to_storable(result.text) or '""'
    if len(text) <= tool.max_result_bytes // 4 or len(data := text.encode()) <= tool.max_result_bytes:
        return replace(result, text=text)
    shown: dict[str, Any] = {
        "tooLong": True,
        "size": len(data),
        "head": text[:HEAD_CHARACTERS],
        "tail": text[-TAIL_CHARACTERS:],
    }
    try:
        artifact = await ctx.artifacts.put(data, f"{tool.name}.txt", key=ctx.idempotency_key)
    except (CoterieError, OSError) as error:
        return replace(
            _join(shown, {"notKept": to_storable(str(error))}, ok=result.ok),
            is_outcome_unknown=result.is_outcome_unknown,
        )
    return replace(_join(shown, artifact.to_dict(), ok=result.ok), is_outcome_unknown=result.is_outcome_unknown)


def exception_result(name: str, error: BaseException) -> ToolResult:
    """Return the result that reports an exception."""
    if isinstance(error, Refused) and hasattr(error, "code"):
        return error_result(error.code, error.message)
    message, kind = safe_message(error), type(error).__name__
    return error_result(
        "tool_failed", f"{name} failed: {to_storable(f'{kind}: {message}' if message else kind)[:MAX_ERROR_CHARACTERS]}"
    )


def safe_message(error: BaseException) -> str:
    """Return the exception's message; empty if its `__str__` fails."""
    try:
        return str(error)
    except BaseException:  # user code, which may raise even SystemExit
        return ""


async def _fit_bytes(name: str, data: bytes, ctx: ToolContext) -> ToolResult:
    try:
        artifact = await ctx.artifacts.put(data, name, key=ctx.idempotency_key)
    except (CoterieError, OSError) as error:
        return error_result(
            "artifact_failed", f"{name} returned {len(data):,} bytes, which could not be stored: {error}"
        )
    return _join({}, artifact.to_dict(), ok=True)


def _join(shown: Mapping[str, Any], more: Mapping[str, Any], *, ok: bool) -> ToolResult:
    text = json.dumps({**more, **shown}, ensure_ascii=False)
    return ToolResult(ok=ok, text=text, artifact_ref=more.get("artifactRef"))
