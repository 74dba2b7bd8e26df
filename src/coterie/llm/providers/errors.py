"""Classification of provider errors: HTTP statuses, error bodies and network errors become `ServiceError`s."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from coterie.llm.service import (
    ContextTooLong,
    DeadlineExceeded,
    MalformedResponse,
    PermanentError,
    ServiceError,
    TransientError,
    UnsupportedCapability,
)
from coterie.redaction import redact
from coterie.text import one_line, to_storable

MAX_RETRY_AFTER = timedelta(minutes=10)
TRANSIENT_STATUSES = frozenset({408, 409, 425, 429})
_FILE = "llmservices.json"
_MAX_QUOTE = 200

_QUOTA = re.compile(r"insufficient_quota|billing|credit balance|exceeded your current quota|payment required", re.I)
_TOO_LONG = re.compile(
    r"context_length_exceeded|(maximum|available|max(imum)?.?model|exceeds? the) context|context (length|window|size)"
    r"|prompt is too long|too many (input )?tokens|input token count",
    re.I,
)
MIN_WINDOW = 256
"""A smaller number in an error message is no context window."""
_NUMBER = r"(\d[\d,]{2,12})"
_WINDOW = re.compile(
    rf"n_ctx\D{{0,5}}{_NUMBER}|context (?:length|window|size)\D{{0,20}}{_NUMBER}|{_NUMBER} maximum"
    rf"|maximum (?:number of tokens|input length)\D{{0,20}}{_NUMBER}",
    re.I,
)
_SENT_WITHOUT_ANSWER = re.compile(rf"{_NUMBER} (?:tokens )?in the (?:messages|prompt|input)", re.I)
_SENT = re.compile(
    rf"n_prompt_tokens\D{{0,5}}{_NUMBER}"
    rf"|(?:request|prompt|input token count|you sent|resulted in|requested|too long:?)\D{{0,12}}{_NUMBER}",
    re.I,
)
_CONTENT = re.compile(
    r"content_filter|content_policy|ResponsibleAIPolicy|content management policy|safety system|moderation", re.I
)
_NO_MODEL = re.compile(
    r"model_not_found|unknown model|(model|deployment)\b.{0,80}(not found|does ?n[o']t exist|not exist)", re.I
)
_REFUSAL = re.compile(
    r"not support|n't support|unsupported|only supported by|not (allowed|enabled|available|accept|permitted)"
    r"|unknown variant|does not (accept|have)|invalid content type|must be a string|requires --(enable|jinja)"
    r"|cannot use custom grammar|endpoints found that support|cannot (read|process|handle)|unrecognized"
    r"|unknown (part|content) type",
    re.I,
)
_REFUSAL_STATUSES = (400, 404, 415, 422, 500, 501)
_REFUSED_TYPE = re.compile(r"(?:unsupported|not support)[^.;]{0,40}?([a-z]+/[a-z0-9][\w.+-]*)")
_TAKEN_TYPES = re.compile(r"\b(?:formats?|types?)\b[^.;]{0,60}(?:png|jpe?g|gif|webp|pdf|wav|mp3)")
_BAD_CONTENT = re.compile(
    r"(could not|unable to|failed to) (be )?(process|load|read|parse|decode|open|identify)"
    r"|not (represent )?a valid (image|audio|pdf|file|document)|corrupt|dimensions"
    r"|\b(image|audio|file|document|pdf)\b.{0,20} exceeds?\b",
    re.I,
)
_CAPABILITY_WORDS = {
    # First: an error about an answer format may name tools too.
    "structured_output": re.compile(r"response_format|json_schema|structured output|grammar", re.I),
    "tool_calling": re.compile(r"\btools?\b|tool.?(call|choice|use)|function.?call", re.I),
    "vision": re.compile(r"image|vision|visual|multi-?modal|mmproj", re.I),
    "audio": re.compile(r"audio", re.I),
    "file": re.compile(r"\bfiles?\b|file_data|pdf|document", re.I),
}
_ONE_TOOL = re.compile(r"\btools?[\[.]\d|schema|tool_call_id|role 'tool'", re.I)
"""An error about one tool or one call does not mean that tools are unsupported."""
_STATUS_BY_WORDS = (
    (re.compile(r"authentication|invalid_api_key|permission", re.I), 401),
    (re.compile(r"invalid_request|bad_request|invalid_prompt", re.I), 400),
    (re.compile(r"rate_limit|overloaded|server_error|api_error|timeout", re.I), 503),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Facts about a request for its error messages, and the key that they must not contain."""

    service: str
    address: str
    model: str
    key: str = field(default="", repr=False)
    key_name: str = ""
    """Environment variable of the key."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Other values that no message may contain."""
    capabilities: Set[str] = frozenset()
    """Which of the capabilities beyond text the request uses; only these can be refused."""
    file_types: Mapping[str, str] = field(default_factory=dict)
    """The MIME types of the files in the request, and the capability that each needs."""

    def describe(self, problem: str, advice: str) -> str:
        return f'service "{self.service}" {problem}: {advice}'

    @property
    def key_advice(self) -> str:
        return f"set {self.key_name} or edit apiKey in {_FILE}" if self.key_name else f"edit apiKey in {_FILE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorResponse:
    """A provider's error, independent of its format."""

    status: int
    text: str
    """Message, code, type and parameter, for matching."""
    message: str
    retry_after: str | None = None

    @property
    def is_temporary(self) -> bool:
        """Some services call a rate limit "quota", but then name a delay."""
        return self.retry_after is not None or "retryDelay" in self.text


def parse_error_body(status: int, body: object, retry_after: str | None = None) -> ErrorResponse:
    """`body`: decoded JSON, or text if it was no JSON."""
    error = body[0] if isinstance(body, list) and body else body
    if isinstance(error, Mapping):
        error = error.get("error") or error
    if not isinstance(error, Mapping):
        text = _strip_markup(str(error or ""))
        return ErrorResponse(status=status, text=text, message=text, retry_after=retry_after)
    message = next((str(error[k]) for k in ("message", "detail", "error", "msg") if error.get(k)), "")
    words: tuple[str, ...] = (
        message,
        *(str(error[k]) for k in ("code", "type", "param", "status") if error.get(k)),
        _nested(error),
    )
    words += tuple(f"{key} {error[key]}" for key in ("n_ctx", "n_prompt_tokens") if error.get(key))
    return ErrorResponse(
        status=status, text=to_storable(" ".join(words)), message=to_storable(message), retry_after=retry_after
    )


def parse_error_in_stream(error: object) -> ErrorResponse:
    """Parse an error that came with status 200, and derive its status from its content."""
    parsed = parse_error_body(0, {"error": error})
    code = error.get("code") if isinstance(error, Mapping) else None
    if isinstance(code, str) and code.isdecimal():
        code = int(code)
    if isinstance(code, int) and 400 <= code <= 599:
        status = code
    else:
        status = next((status for words, status in _STATUS_BY_WORDS if words.search(parsed.text)), 503)
    return ErrorResponse(status=status, text=parsed.text, message=parsed.message)


def classify(context: RequestContext, response: ErrorResponse, now: datetime) -> ServiceError:
    """Return the `ServiceError` for an error response."""
    error = _classify(context, response, now)
    error.status = response.status
    return error


def _classify(context: RequestContext, response: ErrorResponse, now: datetime) -> ServiceError:
    """The order matters: one status has many meanings."""
    status, text, quote = response.status, response.text, _quote(response.message, (context.key, *context.secrets))
    if status in (401, 407) or (status == 403 and not _CONTENT.search(text)):
        problem = f"refused the key ({status})" if context.key else f"wants a key ({status})"
        return PermanentError(context.describe(problem, context.key_advice), category="auth")
    if status == 402 or (_QUOTA.search(text) and not response.is_temporary):
        advice = f"check the plan and billing of its account, or choose another service in {_FILE}"
        return PermanentError(context.describe(f"has no quota left ({status}){quote}", advice), category="quota")
    # A proxy limits the size of a request. If it has files, they are the cause: no text is that long.
    has_too_large_files = status == 413 and context.file_types and not _TOO_LONG.search(text)
    if not has_too_large_files and (status == 413 or (status != 429 and _TOO_LONG.search(text))):
        advice = f"shorten it, or check contextTokens in {_FILE}"
        limit, sent = _token_counts(text)
        problem = f"says the conversation is too long ({status}){quote}"
        return ContextTooLong(context.describe(problem, advice), limit=limit, sent=sent)
    if _CONTENT.search(text):
        problem = f"refused the content ({status}){quote}"
        return PermanentError(context.describe(problem, "say it differently"), category="content")
    if types := _refused_types(context, response):
        problem = f"does not take {', '.join(sorted(types))} ({status}){quote}"
        advice = f"check the capabilities in {_FILE}"
        needed = context.file_types[min(types)]
        return UnsupportedCapability(context.describe(problem, advice), capability=needed, types=types)
    if has_too_large_files:
        problem = f"does not take a request of this size ({status}){quote}"
        needed = min(context.file_types.values())
        return UnsupportedCapability(context.describe(problem, "files are left out"), capability=needed, is_size=True)
    if capability := _refused_content(context, response):
        problem = f"cannot use a file of the request ({status}){quote}"
        return UnsupportedCapability(
            context.describe(problem, "it is left out"), capability=capability, is_content=True
        )
    if capability := _refused_capability(context, response):
        problem = f"does not take {capability} ({status}){quote}"
        return UnsupportedCapability(
            context.describe(problem, f"check its capabilities in {_FILE}"), capability=capability
        )
    if status in TRANSIENT_STATUSES or status >= 500:
        problem = "asks us to slow down" if status == 429 else "is not able to answer"
        advice = f"it is tried again; if the error stays, check the service at {context.address}"
        return TransientError(
            context.describe(f"{problem} ({status}){quote}", advice),
            retry_after=parse_retry_after(response.retry_after, now),
        )
    if status == 404 or _NO_MODEL.search(text):
        problem = f'does not know the model "{context.model}" at {context.address} ({status}){quote}'
        return PermanentError(context.describe(problem, f"check model and baseURL in {_FILE}"), category="model")
    if 300 <= status < 400:
        problem = f"redirects from {context.address} to another address ({status})"
        return PermanentError(context.describe(problem, f"correct baseURL in {_FILE}"), category="request")
    problem = f"did not accept the request ({status}){quote}"
    return PermanentError(context.describe(problem, f"check its entry in {_FILE}"), category="request")


def _token_counts(text: str) -> tuple[int | None, int | None]:
    """Return the context window and the size of the request that an error message names, in tokens."""
    limit, sent = _first_number(_WINDOW, text), _first_number(_SENT_WITHOUT_ANSWER, text) or _first_number(_SENT, text)
    if limit is None or limit < MIN_WINDOW:
        return None, None
    # Less than the window may still be too long together with the answer; far less is another number.
    return limit, sent if sent and sent * 2 > limit else None


def _first_number(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return int(re.sub(r"\D", "", next(filter(None, match.groups())))) if match else None


def unreachable(context: RequestContext, error: BaseException) -> TransientError:
    """The connection could not be opened, or was lost before the response."""
    cause = redact(_root_cause(error), (context.key, *context.secrets), fragments=True)
    problem = f"cannot be reached at {context.address} ({cause})"
    return TransientError(
        context.describe(problem, f"check that it runs, and baseURL in {_FILE}"), reason="unreachable"
    )


def timed_out(context: RequestContext, exceeded: DeadlineExceeded) -> TransientError:
    advice = f"check that it works, or raise {exceeded.setting} in {_FILE}"
    return TransientError(context.describe(str(exceeded), advice), reason="timeout")


def truncated(context: RequestContext) -> TransientError:
    return TransientError(
        context.describe("broke off in the middle of its answer", "it is tried again"), reason="truncated"
    )


def empty_response(context: RequestContext) -> TransientError:
    return TransientError(
        context.describe("sent an empty answer", f"it is tried again; check baseURL in {_FILE}"), reason="truncated"
    )


def malformed(context: RequestContext, problem: str) -> MalformedResponse:
    advice = f"check that {context.address} is an OpenAI-compatible endpoint (baseURL in {_FILE})"
    return MalformedResponse(context.describe(f"sent an answer that cannot be used, {problem}", advice))


def content_filtered(context: RequestContext) -> PermanentError:
    return PermanentError(
        context.describe("withheld its whole answer by its content filter", "say it differently"), category="content"
    )


def invalid_key(context: RequestContext) -> PermanentError:
    problem = "has a key with characters that an HTTP header cannot contain"
    return PermanentError(context.describe(problem, context.key_advice), category="auth")


def invalid_address(context: RequestContext) -> PermanentError:
    problem = f'has no usable address in "{one_line(context.address)}"'
    return PermanentError(
        context.describe(problem, f"baseURL in {_FILE} must begin with http:// or https://"), category="request"
    )


def package_missing(context: RequestContext, provider: str, package: str) -> PermanentError:
    problem = f'needs a package for provider "{provider}" that is not installed'
    advice = f'run pip install "{package}", or change provider in {_FILE}'
    return PermanentError(context.describe(problem, advice), category="request")


def parse_retry_after(value: str | None, now: datetime) -> timedelta | None:
    """Parse a `Retry-After` header in seconds or as a date. The result is between 0 and ten minutes."""
    if not value:
        return None
    try:
        wait = timedelta(seconds=min(float(value), MAX_RETRY_AFTER.total_seconds()))
    except (ValueError, OverflowError):
        try:
            at = parsedate_to_datetime(value)
        except ValueError:
            return None
        wait = (at if at.tzinfo else at.replace(tzinfo=UTC)) - now
    return max(timedelta(0), min(wait, MAX_RETRY_AFTER))


def _refused_types(context: RequestContext, response: ErrorResponse) -> frozenset[str]:
    """Return the MIME types of files in the request that the error refuses, while others are taken."""
    text = response.text.lower()
    if response.status not in _REFUSAL_STATUSES or not _REFUSAL.search(text):
        return frozenset()
    if named := {found.rstrip(".") for found in _REFUSED_TYPE.findall(text)} & context.file_types.keys():
        return frozenset(named)
    if not _TAKEN_TYPES.search(text):
        return frozenset()
    # The error lists the types that are taken. It refuses the others that need the same capability.
    about = {name for name, words in _CAPABILITY_WORDS.items() if words.search(text)}
    needed = {one: need for one, need in context.file_types.items() if need in about}
    others = {one for one in needed if one.partition("/")[2] not in text}
    return frozenset(others) if len({needed[one] for one in others}) == 1 else frozenset()


def _refused_content(context: RequestContext, response: ErrorResponse) -> str | None:
    """Return the capability of a file whose content the service cannot use, although it takes files of its type."""
    text = response.text
    # Other errors with the status 500 are temporary. llama.cpp answers so to a file that it cannot decode.
    if response.status not in (400, 415, 422) and not (response.status == 500 and "failed to load" in text.lower()):
        return None
    if not (_BAD_CONTENT.search(text) or _TAKEN_TYPES.search(text.lower())):
        return None
    used = {*context.file_types.values()}
    return next((name for name, words in _CAPABILITY_WORDS.items() if name in used and words.search(text)), None)


def _refused_capability(context: RequestContext, response: ErrorResponse) -> str | None:
    status, text = response.status, response.text
    if status not in _REFUSAL_STATUSES or not context.capabilities:
        return None
    if status != 415 and not _REFUSAL.search(text):
        return None
    used = context.capabilities - {"tool_calling"} if _ONE_TOOL.search(text) else context.capabilities
    named = next((name for name, words in _CAPABILITY_WORDS.items() if name in used and words.search(text)), None)
    content = used - {"tool_calling", "structured_output"}
    if named or len(content) != 1:
        return named
    return min(content) if status == 415 or "content" in text.lower() else None


def _quote(message: str, secrets: Iterable[str]) -> str:
    # Redact before shortening, so that no part of the key is left at the cut.
    text = one_line(redact(message[:4000], secrets, fragments=True), _MAX_QUOTE).rstrip(".")
    return f' saying "{text}"' if text else ""


def _root_cause(error: BaseException) -> str:
    for cause in _causes(error):
        match cause:
            case ssl.SSLError():
                return f"the secure connection failed, {one_line(cause.reason or str(cause))}"
            case socket.gaierror():
                return "no such host"
            case ConnectionRefusedError():
                return "connection refused"
            case ConnectionResetError():
                return "connection reset"
    return one_line(str(error)) or type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
        error = inner or error.__cause__ or error.__context__


def _nested(error: Mapping[str, Any]) -> str:
    """Return the error of the upstream service that a gateway nests one level down."""
    inner = [error.get(key) for key in ("metadata", "innererror", "details", "detail")]
    return " ".join(str(value)[:2000] for value in inner if isinstance(value, Mapping | list))


def _strip_markup(text: str) -> str:
    return " ".join(re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", text[:20_000], flags=re.S | re.I).split())
