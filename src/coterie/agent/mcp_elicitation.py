"""Questions that an MCP server asks the person during a call ("elicitation").

Each field of the server's form becomes one question with quick replies. The person may also answer freely.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coterie.agent.tools import AskFunction
from coterie.messages import MAX_QUICK_REPLIES
from coterie.text import one_line, to_storable

if TYPE_CHECKING:  # imported only where a server is connected
    import mcp

DECLINE, ACCEPT, DONE = "Decline", "Accept", "Done"
_YES, _NO = "Yes", "No"
MAX_TRIES = 3
"""Answers to one question. If the last one is unusable too, the question is cancelled."""
MAX_FIELDS = 20


class _Unusable(Exception):
    """The answer does not fit the field; the message says what is expected."""


class _Declined(Exception):
    """The person declined."""


class _Cancelled(Exception):
    """There is no usable answer."""


async def answer_elicitation(params: Any, *, server: str, ask: AskFunction) -> mcp.types.ElicitResult:
    """Ask the person what the server wants to know; return the answer."""
    from mcp.types import ElicitResult

    about = f"The tool server {server} asks: {to_storable(params.message)}"
    try:
        if params.mode == "url":
            await _ask_field({"enum": [DONE]}, f"{about}\nOpen this address only if you trust it: {params.url}", ask)
            return ElicitResult(action="accept")
        fields: Mapping[str, Any] = params.requested_schema.get("properties") or {}
        if not fields:
            await _ask_field({"enum": [ACCEPT]}, about, ask)
            return ElicitResult(action="accept", content={})
        if len(fields) > MAX_FIELDS:
            return ElicitResult(action="cancel")
        required = params.requested_schema.get("required") or []
        content: dict[str, Any] = {}
        for name, schema in fields.items():
            label = _label(name, schema, is_optional=name not in required)
            value = await _ask_field(schema, f"{about}\n{label}", ask, is_optional=name not in required)
            if value is not None:
                content[name] = value
        return ElicitResult(action="accept", content=content)
    except _Declined:
        return ElicitResult(action="decline")
    except _Cancelled:
        return ElicitResult(action="cancel")


_SKIP = "Skip"


def _label(name: str, schema: Mapping[str, Any], *, is_optional: bool) -> str:
    title = one_line(str(schema.get("title") or name), 100)
    described = one_line(str(schema.get("description") or ""), 500)
    text = f"{title}: {described}" if described else title
    return f"{text} (optional)" if is_optional else text


async def _ask_field(schema: Mapping[str, Any], text: str, ask: AskFunction, *, is_optional: bool = False) -> Any:
    """Ask until the answer fits the field. None: the person skipped an optional field."""
    choices = list(_choices(schema))
    extra = [_SKIP, DECLINE] if is_optional else [DECLINE]
    if len(choices) + len(extra) > MAX_QUICK_REPLIES:  # too many buttons
        text, buttons = f"{text}\nOne of: {', '.join(choices)}", extra
    else:
        buttons = [*choices, *extra]
    problem = ""
    for _ in range(MAX_TRIES):
        answer = await ask(f"{problem}{text}", [one_line(button, 100) for button in buttons])
        if answer is None:
            raise _Cancelled
        match answer.strip().casefold():
            case choice if choice == DECLINE.casefold():
                raise _Declined
            case choice if is_optional and choice in ("", _SKIP.casefold()):
                return None
        try:
            return _parse(schema, answer.strip())
        except _Unusable as expected:
            problem = f"That cannot be used: {expected}.\n"
    raise _Cancelled


def _choices(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values to choose from, by their titles."""
    if schema.get("type") == "boolean":
        return {_YES: True, _NO: False}
    titled = schema.get("oneOf") or schema.get("anyOf")
    if titled:
        return {str(one.get("title") or one["const"]): one["const"] for one in titled if "const" in one}
    values = schema.get("enum") or []
    return dict(zip(map(str, schema.get("enumNames") or values), values, strict=False))


def _parse(schema: Mapping[str, Any], answer: str) -> Any:
    """Return the value of an answer. `_Unusable`: it does not fit."""
    if schema.get("type") == "array":
        return [_parse(schema.get("items") or {}, part.strip()) for part in answer.split(",") if part.strip()]
    if choices := _choices(schema):
        for title, value in choices.items():
            if answer.casefold() in (title.casefold(), str(value).casefold()):
                return value
        raise _Unusable(f"expected one of {', '.join(choices)}")
    match schema.get("type"):
        case "integer" | "number" as kind:
            return _number(schema, answer, kind)
    if not answer:
        raise _Unusable("expected a text")
    if not schema.get("minLength", 0) <= len(answer) <= schema.get("maxLength", len(answer)):
        raise _Unusable("the text is too short or too long")
    return answer


def _number(schema: Mapping[str, Any], answer: str, kind: str) -> float:
    try:
        value: float = int(answer) if kind == "integer" else float(answer)
    except ValueError:
        raise _Unusable("expected a whole number" if kind == "integer" else "expected a number") from None
    least, most = schema.get("minimum", value), schema.get("maximum", value)
    if not least <= value <= most:
        raise _Unusable(f"expected a number from {least} to {most}")
    return value
