"""How much a model can read: token estimates, learned limits of context windows, and requests shortened to fit.

Shortening changes only what a request shows. It goes from the oldest to the newest message, and never separates tool
calls from their results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from coterie.llm.config import ServiceEntry
from coterie.llm.routing import to_single_line_json
from coterie.llm.service import (
    AssistantMessage,
    Attachment,
    ChatMessage,
    Completion,
    ContextTooLong,
    InlineFile,
    ModelRequest,
    TextPart,
    TokenUsage,
    ToolCall,
    ToolMessage,
    ToolSpec,
    UserMessage,
)

BYTES_PER_TOKEN = 3
"""A conservative estimate: English has about 4, Chinese about 2.5."""
MESSAGE_TOKENS = 8
"""Role and keys of one message or tool call."""
FILE_TOKENS = 500
"""A picture has 100 to 1,500 tokens; the description of a file has about 200."""
MAX_ANSWER_RESERVE = 8_192
"""Tokens left free for the answer in large windows, if the service entry has no `maxTokens`."""
MARGIN = 1.05
"""Texts differ in bytes per token, so the last request does not predict the next one exactly."""
MIN_RATIO, MAX_RATIO = 0.7, 8.0
"""Bounds of the learned ratio. Some services report fewer tokens than they read, because some were cached."""
MIN_CALIBRATION_TOKENS = 200
REJECTED_FACTOR = 0.6
"""After an error that names no numbers, the next request has at most this part of the rejected one."""
STRICTLY_SMALLER = 0.9
GROWTH = 1.02
"""After each accepted request, `max_estimate` grows by this factor."""
OLDER_WIDTHS = (4_000, 1_500, 600, 200)
"""Characters to which older texts are shortened, in this order, until the request fits."""
FILE_WIDTH = 600
"""Where texts are shortened to this width or less, files are replaced by references."""
MIN_WIDTH = 60
NOT_SHOWN = "[{0:,} earlier messages are not shown, because they do not fit your model.]"
_OPENING = re.compile(r"<([a-z2-7]{8}) [^\n]*>\n")
_ARTIFACT_REF = re.compile(r'"artifactRef": ?"([^"\\]{1,100})"')
_encode = msgspec.json.Encoder().encode


# Estimates


def estimate_tokens(request: ModelRequest) -> int:
    """Estimate the tokens of a request from its size as it is sent."""
    return request.estimate or sum(map(message_tokens, request.messages)) + tool_tokens(request.tools)


def message_tokens(message: ChatMessage) -> int:
    match message:
        case UserMessage(parts):
            return MESSAGE_TOKENS + sum(map(_part_tokens, parts))
        case AssistantMessage(text, calls):
            return MESSAGE_TOKENS + text_tokens(text) + sum(map(_call_tokens, calls))
    return MESSAGE_TOKENS + text_tokens(message.text)


def tool_tokens(tools: Iterable[ToolSpec]) -> int:
    return sum(MESSAGE_TOKENS + math.ceil(len(_encode(tool)) / BYTES_PER_TOKEN) for tool in tools)


def text_tokens(text: str) -> int:
    """Estimate the tokens of a text, with the escapes that it has in JSON."""
    data = text.encode("utf-8", "replace")
    return math.ceil((len(data) + data.count(b'"') + data.count(b"\n") + data.count(b"\\")) / BYTES_PER_TOKEN)


def _part_tokens(part: TextPart | Attachment | InlineFile) -> int:
    return text_tokens(part.text) if isinstance(part, TextPart) else FILE_TOKENS


def _call_tokens(call: ToolCall) -> int:
    # Arguments are sent as JSON in a JSON string, so their quotes are escaped.
    return 2 * MESSAGE_TOKENS + text_tokens(call.name) + text_tokens(_encode(call.arguments).decode())


def fill_usage(request: ModelRequest, answer: Completion) -> Completion:
    """Return `answer` with estimates for the token counts that the service did not report."""
    reported = answer.usage
    is_empty = not answer.text and not answer.calls
    if reported.input_tokens and (reported.output_tokens or is_empty):
        return answer
    words = answer.text + "".join(
        f"{call.name}{call.invalid_arguments or dict(call.arguments)}" for call in answer.calls
    )
    estimate = estimate_usage(request, words)
    return replace(
        answer,
        usage=replace(
            reported,
            input_tokens=reported.input_tokens or estimate.input_tokens,
            output_tokens=reported.output_tokens or estimate.output_tokens,
            estimated=True,
        ),
    )


def estimate_usage(request: ModelRequest, words: str) -> TokenUsage:
    """Estimate the usage of a request and its answer text."""
    return TokenUsage(input_tokens=estimate_tokens(request), output_tokens=text_tokens(words), estimated=True)


# Limits


@dataclass(slots=True)
class _Learned:
    window: int | None = None
    """The context window that an error message named."""
    ratio: float = 1.0
    """Tokens that the service counts per estimated token."""
    max_estimate: float | None = None
    """Largest estimate to send, found by rejected requests, for a service whose errors name no numbers."""


class ContextWindows:
    """Learned limits of context windows, by service entry; a changed entry has none. In memory of this process only."""

    def __init__(self) -> None:
        self._learned: dict[ServiceEntry, _Learned] = {}

    def _of(self, entry: ServiceEntry) -> _Learned:
        learned = self._learned.get(entry)
        if learned is None:
            learned = self._learned[entry] = _Learned()
        return learned

    def budget(self, entry: ServiceEntry) -> int | None:
        """Return the largest estimate of a request that leaves space for an answer. None: the window is unknown."""
        learned = self._of(entry)
        limits = [] if learned.max_estimate is None else [learned.max_estimate]
        windows = [window for window in (entry.context_tokens, learned.window) if window]
        if windows:
            window = min(windows)
            reserve = entry.max_tokens or min(window // 8, MAX_ANSWER_RESERVE)
            limits.append((window - min(reserve, window // 2)) / (learned.ratio * MARGIN))
        return max(int(min(limits)), 1) if limits else None

    def record_answer(self, entry: ServiceEntry, request: ModelRequest, estimate: int, usage: TokenUsage) -> None:
        """Compare the reported tokens of an accepted request with their estimate."""
        learned = self._of(entry)
        if learned.max_estimate is not None:
            learned.max_estimate *= GROWTH
        if usage.estimated or estimate < MIN_CALIBRATION_TOKENS or _has_files(request):
            return
        ratio = min(max(usage.input_tokens / estimate, MIN_RATIO), MAX_RATIO)
        # A higher ratio counts at once, a lower one by degrees.
        learned.ratio = ratio if ratio > learned.ratio else learned.ratio * 0.75 + ratio * 0.25

    def record_too_long(self, entry: ServiceEntry, estimate: int, error: ContextTooLong) -> int:
        """Learn from a rejected request. Returns the new budget, which is smaller than `estimate`."""
        learned = self._of(entry)
        if error.limit:
            learned.window = min(error.limit, learned.window or error.limit)
        if error.sent and estimate:
            learned.ratio = min(max(error.sent / estimate, learned.ratio), MAX_RATIO)
        budget = self.budget(entry)
        if budget is None or budget > estimate * STRICTLY_SMALLER:
            learned.max_estimate = estimate * REJECTED_FACTOR
        return min(int(estimate * STRICTLY_SMALLER), self.budget(entry) or 0)

    def forget(self, entry: ServiceEntry) -> None:
        """Forget the learned limits of a service that also rejects shortened requests."""
        self._learned.pop(entry, None)


def _has_files(request: ModelRequest) -> bool:
    return any(
        not isinstance(part, TextPart)
        for message in request.messages
        if isinstance(message, UserMessage)
        for part in message.parts
    )


# Shortening


def fit_messages(messages: Sequence[ChatMessage], budget: int) -> list[ChatMessage] | None:
    """Return the messages, shortened to `budget` tokens, oldest first. None: not even the newest fits.

    The messages that the model has to react to are shortened last: those after its last answer, or the results of its
    last calls.
    """
    groups = [_Group.of(group) for group in _split(messages)]
    if sum(group.tokens for group in groups) <= budget:
        return list(messages)
    newest = _newest(groups)
    older, newest_groups = groups[:newest], groups[newest:]
    for width in OLDER_WIDTHS:
        if _shorten_until(older, width, budget - _total(newest_groups)):
            return _flatten([*older, *newest_groups])
    width = max(budget * BYTES_PER_TOKEN, MIN_WIDTH)
    note_tokens = message_tokens(_note(len(groups)))
    dropped, older_tokens = 0, _total(older)
    while True:
        space = budget - note_tokens - _total(newest_groups)
        while dropped < len(older) and older_tokens > space:
            older_tokens -= older[dropped].tokens
            dropped += 1
        if space >= 0:
            return _flatten([*_noted(dropped), *older[dropped:], *newest_groups])
        if width > MIN_WIDTH:
            width = max(width * 3 // 4, MIN_WIDTH)
            _shorten_until(newest_groups, width, budget - note_tokens)
        elif len(newest_groups) > 1:
            older.append(newest_groups.pop(0))
            dropped = len(older)
        elif (text := _as_text(newest_groups[0], space + newest_groups[0].tokens)) is not None:
            return _flatten([*_noted(dropped), text])
        else:
            return None


@dataclass(slots=True)
class _Group:
    """Messages that must stay together: one message, or tool calls with all their results."""

    messages: tuple[ChatMessage, ...]
    tokens: int

    @classmethod
    def of(cls, messages: Iterable[ChatMessage]) -> _Group:
        kept = tuple(messages)
        return cls(kept, sum(map(message_tokens, kept)))

    def shortened(self, width: int) -> _Group:
        return _Group.of(shorten_message(message, width) for message in self.messages)


def _split(messages: Iterable[ChatMessage]) -> list[list[ChatMessage]]:
    groups: list[list[ChatMessage]] = []
    for message in messages:
        if isinstance(message, ToolMessage) and groups:
            groups[-1].append(message)
        else:
            groups.append([message])
    return groups


def _newest(groups: Sequence[_Group]) -> int:
    """Index of the first group that the model has to react to."""
    index = len(groups)
    while index and isinstance(groups[index - 1].messages[0], UserMessage):
        index -= 1
    return index if index < len(groups) else max(index - 1, 0)


def _shorten_until(groups: list[_Group], width: int, budget: int) -> bool:
    """Shorten texts to `width`, oldest first. True as soon as the groups fit."""
    total = _total(groups)
    for index, group in enumerate(groups):
        if total <= budget:
            return True
        shorter = group.shortened(width)
        if shorter.tokens < group.tokens:
            total -= group.tokens - shorter.tokens
            groups[index] = shorter
    return total <= budget


def _total(groups: Iterable[_Group]) -> int:
    return sum(group.tokens for group in groups)


def _flatten(groups: Iterable[_Group]) -> list[ChatMessage]:
    return [message for group in groups for message in group.messages]


def _note(count: int) -> UserMessage:
    return UserMessage((TextPart(NOT_SHOWN.format(count)),))


def _noted(count: int) -> list[_Group]:
    return [_Group.of([_note(count)])] if count else []


def _as_text(group: _Group, budget: int) -> _Group | None:
    """Return a group of calls as one line of text: the ids and names of many calls alone may exceed the window."""
    width = (budget - MESSAGE_TOKENS) * BYTES_PER_TOKEN // 2
    if len(group.messages) == 1 or width < MIN_WIDTH:
        return None
    results = [message.text for message in group.messages if isinstance(message, ToolMessage)]
    each = max(width // len(results), 1) if results else 1
    line = to_single_line_json({"toolResults": [text[:each] for text in results]}).encode()[:width]
    return _Group.of([UserMessage((TextPart(line.decode(errors="ignore")),))])


def shorten_message(message: ChatMessage, width: int) -> ChatMessage:
    """Return the message with texts of about `width` characters. A small width replaces files by references."""
    match message:
        case UserMessage(parts):
            return UserMessage(tuple(_shorten_part(part, width) for part in parts))
        case AssistantMessage(text, calls):
            shorter = tuple(shorten_call(call, width, width) for call in calls)
            return AssistantMessage(shorten_text(text, width), shorter)
        case ToolMessage(call_id, text):
            return ToolMessage(call_id, shorten_text(text, width))
    return message


def _shorten_part(part: TextPart | Attachment | InlineFile, width: int) -> TextPart | Attachment | InlineFile:
    if isinstance(part, TextPart):
        return TextPart(shorten_text(part.text, width))
    if width > FILE_WIDTH:
        return part
    reference = {"artifactRef": part.artifact_ref} if isinstance(part, Attachment) else {}
    shown = {**reference, "filename": part.filename[:MIN_WIDTH], "shown": False}
    return TextPart(to_single_line_json({"attachment": shown}))


def shorten_text(text: str, width: int) -> str:
    """Return the beginning and the end of a text, with a note between. The lines of a message's frame stay."""
    opening = _OPENING.match(text)
    start = opening.end() if opening else 0
    closing = f"\n</{opening[1]}>" if opening else ""
    end = len(text) - len(closing) if text.endswith(closing) else len(text)
    if end - start <= width:
        return text
    head_end, tail_start = start + width * 2 // 3, end - width // 3
    head, missing, tail = text[start:head_end], text[head_end:tail_start], text[tail_start:end]
    refs = [ref for ref in dict.fromkeys(_ARTIFACT_REF.findall(missing)) if ref not in head + tail]
    whole = f"; artifactRef {', '.join(refs[:3])}" if refs else ""
    note = f"\n[… {len(missing):,} characters left out{whole} …]\n"
    return text if len(note) >= len(missing) else f"{text[:head_end]}{note}{text[tail_start:]}"


def shorten_call(call: ToolCall, limit: int, head: int) -> ToolCall:
    """Return the call with the first `head` bytes of its arguments if they have more than `limit` bytes."""
    arguments = _encode(call.arguments)
    if len(arguments) <= limit:
        return call
    match call.arguments:
        case {"shortened": True, "size": int(size), "head": str(shown)}:
            if len(shown) <= head:
                return call  # the other keys alone exceed the limit
        case _:
            size, shown = len(arguments), arguments[:head].decode(errors="ignore")
    return replace(call, arguments={"shortened": True, "size": size, "head": shown[:head]})


ASSUMED_WINDOW = 65_536
"""Context window, in tokens, of a service that does not declare its own."""


def mail_budget(window: int | None) -> int:
    """Return the bytes of waiting mail that one request takes: a quarter of the context window.

    The other quarters are for the prompt and the tools, the earlier conversation, and the answer.
    """
    return (window or ASSUMED_WINDOW) * BYTES_PER_TOKEN // 4


SUMMARY_SHARE = 8
"""A summary has at most 1/8 of the tokens that a request may have."""
MAX_SUMMARY_TOKENS = 4_000
MIN_SUMMARY_TOKENS = 60


def summary_limit(budget: int) -> int:
    """Return the tokens that a summary may have, if a request may have `budget` tokens."""
    return min(max(budget // SUMMARY_SHARE, MIN_SUMMARY_TOKENS), MAX_SUMMARY_TOKENS)


def cut_text(text: str, limit: int, *, keep_end: bool = False) -> str:
    """Return the beginning, or the end, of a text: at most `limit` tokens, with "…" where it was cut."""
    if text_tokens(text) <= limit:
        return text
    width = max(limit * BYTES_PER_TOKEN - len("…".encode()), 0)
    data = text.encode("utf-8", "replace")
    while width:
        part = (data[len(data) - width :] if keep_end else data[:width]).decode(errors="ignore")
        shown = f"…{part}" if keep_end else f"{part}…"
        if text_tokens(shown) <= limit:
            return shown
        width = width * 9 // 10  # escapes of JSON need space too
    return "…"
