"""What a failure of a service means: which error it is, and one sentence on it."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from coterie.llm.service import Malformed, ServiceError, Terminal, TooLong, Transient, Unsupported
from coterie.text import clean, one_line

LONGEST_WAIT = timedelta(minutes=10)
TRANSIENT = frozenset({408, 409, 425, 429})
_FILE = "llmservices.json"
_QUOTED = 200

_QUOTA = re.compile(r"insufficient_quota|billing|credit balance|exceeded your current quota|payment required", re.I)
_TOO_LONG = re.compile(
    r"context_length_exceeded|(maximum|available|max(imum)?.?model|exceeds? the) context|context (length|window|size)"
    r"|prompt is too long|too many (input )?tokens|input token count",
    re.I,
)
_CONTENT = re.compile(
    r"content_filter|content_policy|ResponsibleAIPolicy|content management policy|safety system|moderation", re.I
)
_NO_MODEL = re.compile(
    r"model_not_found|unknown model|(model|deployment)\b.{0,80}(not found|does ?n[o']t exist|not exist)", re.I
)
_REFUSES = re.compile(
    r"not support|n't support|unsupported|only supported by|not (allowed|enabled|available|accept|permitted)"
    r"|unknown variant|does not (accept|have)|invalid content type|must be a string|requires --enable"
    r"|endpoints found that support|cannot (read|process|handle)|unrecognized|unknown (part|content) type",
    re.I,
)
_ABOUT = {
    "tool_calling": re.compile(r"\btools?\b|tool.?(call|choice|use)|function.?call", re.I),
    "vision": re.compile(r"image|vision|visual|multi-?modal|mmproj", re.I),
    "audio": re.compile(r"audio", re.I),
    "file": re.compile(r"\bfiles?\b|file_data|pdf|document", re.I),
}
_ONE_TOOL = re.compile(r"\btools?[\[.]\d|schema|tool_call_id|role 'tool'", re.I)
"""A complaint about one tool or one call is no refusal of tools."""
_KIND_STATUS = (
    (re.compile(r"authentication|invalid_api_key|permission", re.I), 401),
    (re.compile(r"invalid_request|bad_request|invalid_prompt", re.I), 400),
    (re.compile(r"rate_limit|overloaded|server_error|api_error|timeout", re.I), 503),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Whom we asked and with what: the words an error needs, and the key it must not hold."""

    service: str
    address: str
    model: str
    key: str = field(default="", repr=False)
    key_name: str = ""
    """The environment variable the key comes from."""
    carried: Set[str] = frozenset()
    """Of `vision`, `audio`, `file` and `tool_calling`, what the request holds; only that can have been refused."""

    def sentence(self, what: str, mend: str) -> str:
        return f'service "{self.service}" {what}: {mend}'

    @property
    def mend_key(self) -> str:
        return f"set {self.key_name} or edit apiKey in {_FILE}" if self.key_name else f"edit apiKey in {_FILE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """What a service says is wrong, whatever shape it says it in."""

    status: int
    text: str
    """All its words: message, code, type, parameter."""
    message: str
    retry_after: str | None = None

    @property
    def will_pass(self) -> bool:
        """Some services say "quota" of a limit by the minute; those also say when to come back."""
        return self.retry_after is not None or "retryDelay" in self.text


def complaint(status: int, body: object, retry_after: str | None = None) -> Complaint:
    """`body` is the decoded JSON, or the text where it was none."""
    error = body[0] if isinstance(body, list) and body else body
    if isinstance(error, Mapping):
        error = error.get("error") or error
    if not isinstance(error, Mapping):
        shown = _without_markup(str(error or ""))
        return Complaint(status=status, text=shown, message=shown, retry_after=retry_after)
    message = next((str(error[k]) for k in ("message", "detail", "error", "msg") if error.get(k)), "")
    words = (message, *(str(error[k]) for k in ("code", "type", "param", "status") if error.get(k)), _nested(error))
    return Complaint(status=status, text=clean(" ".join(words)), message=clean(message), retry_after=retry_after)


def told_in_answer(error: object) -> Complaint:
    """A complaint that came with status 200: its own words say what status it should have had."""
    bare = complaint(0, {"error": error})
    code = error.get("code") if isinstance(error, Mapping) else None
    if isinstance(code, str) and code.isdecimal():
        code = int(code)
    if isinstance(code, int) and 400 <= code <= 599:
        status = code
    else:
        status = next((status for kind, status in _KIND_STATUS if kind.search(bare.text)), 503)
    return Complaint(status=status, text=bare.text, message=bare.message)


def failure(asked: Asked, said: Complaint, now: datetime) -> ServiceError:
    """The error that a refused request is. The order matters: services use one status for many things."""
    status, quote = said.status, _quote(said.message, asked.key)
    if status in (401, 407) or (status == 403 and not _CONTENT.search(said.text)):
        what = f"refused the key ({status})" if asked.key else f"wants a key ({status})"
        return Terminal(asked.sentence(what, asked.mend_key), category="auth")
    if status == 402 or (_QUOTA.search(said.text) and not said.will_pass):
        mend = f"check the plan and billing of its account, or choose another service in {_FILE}"
        return Terminal(asked.sentence(f"has no quota left ({status}){quote}", mend), category="quota")
    if status == 413 or (status != 429 and _TOO_LONG.search(said.text)):
        mend = f"shorten it, or check contextTokens in {_FILE}"
        return TooLong(asked.sentence(f"says the conversation is too long ({status}){quote}", mend))
    if _CONTENT.search(said.text):
        return Terminal(
            asked.sentence(f"refused the content ({status}){quote}", "say it differently"), category="content"
        )
    if refused := _unsupported(asked, said):
        mend = f"check its capabilities in {_FILE}"
        return Unsupported(asked.sentence(f"does not take {refused} ({status}){quote}", mend), what=refused)
    return _plain_failure(asked, said, quote, now)


def _plain_failure(asked: Asked, said: Complaint, quote: str, now: datetime) -> ServiceError:
    status = said.status
    if status in TRANSIENT or status >= 500:
        wait = retry_after(said.retry_after, now)
        mend = f"it is tried again; if it stays so, look after the service at {asked.address}"
        what = "asks us to slow down" if status == 429 else "is not able to answer"
        return Transient(asked.sentence(f"{what} ({status}){quote}", mend), retry_after=wait)
    if status == 404 or _NO_MODEL.search(said.text):
        what = f'does not know the model "{asked.model}" at {asked.address} ({status}){quote}'
        return Terminal(asked.sentence(what, f"check model and baseURL in {_FILE}"), category="model")
    if 300 <= status < 400:
        what = f"sends us from {asked.address} to another address ({status})"
        return Terminal(asked.sentence(what, f"put the right one into baseURL in {_FILE}"), category="request")
    what = f"did not accept the request ({status}){quote}"
    return Terminal(asked.sentence(what, f"check its entry in {_FILE}"), category="request")


def unreachable(asked: Asked, error: BaseException) -> Transient:
    """The connection could not be made, or broke."""
    what = f"cannot be reached at {asked.address} ({without_key(_cause(error), asked.key)})"
    return Transient(asked.sentence(what, f"check that it runs, and baseURL in {_FILE}"), why="unreachable")


def late(asked: Asked, why: object) -> Transient:
    return Transient(asked.sentence(str(why), f"check that it is well, or raise timeout in {_FILE}"), why="late")


def cut(asked: Asked) -> Transient:
    return Transient(asked.sentence("broke off in the middle of its answer", "it is tried again"), why="cut")


def empty(asked: Asked) -> Transient:
    return Transient(asked.sentence("sent an empty answer", f"it is tried again; check baseURL in {_FILE}"), why="cut")


def malformed(asked: Asked, why: str) -> Malformed:
    mend = f"check that {asked.address} is an OpenAI-compatible endpoint (baseURL in {_FILE})"
    return Malformed(asked.sentence(f"sent an answer that cannot be used, {why}", mend))


def filtered(asked: Asked) -> Terminal:
    return Terminal(
        asked.sentence("withheld its whole answer by its content filter", "say it differently"), category="content"
    )


def unusable_key(asked: Asked) -> Terminal:
    return Terminal(asked.sentence("has a key that no header can carry", asked.mend_key), category="auth")


def unusable_address(asked: Asked) -> Terminal:
    what = f'has no usable address in "{one_line(asked.address)}"'
    return Terminal(asked.sentence(what, f"baseURL in {_FILE} must begin with http:// or https://"), category="request")


def not_installed(asked: Asked, provider: str, package: str) -> Terminal:
    what = f'needs a package for provider "{provider}" that is not installed'
    return Terminal(
        asked.sentence(what, f'run pip install "{package}", or change provider in {_FILE}'), category="request"
    )


def retry_after(value: str | None, now: datetime) -> timedelta | None:
    """A `Retry-After` header, in seconds or as a date; never negative, never more than ten minutes."""
    if not value:
        return None
    try:
        wait = timedelta(seconds=min(float(value), LONGEST_WAIT.total_seconds()))
    except (ValueError, OverflowError):
        try:
            at = parsedate_to_datetime(value)
        except ValueError:
            return None
        wait = (at if at.tzinfo else at.replace(tzinfo=UTC)) - now
    return max(timedelta(0), min(wait, LONGEST_WAIT))


def without_key(text: str, key: str) -> str:
    """`text` without the key or any piece of it that is long enough to be of use. `none` and the like are no keys."""
    size = min(8, len(key))
    if size < 5:
        return text
    secret = {key[i : i + size] for i in range(len(key) - size + 1)}
    hit = [text[i : i + size] in secret for i in range(len(text))]
    covered = [any(hit[max(0, i - size + 1) : i + 1]) for i in range(len(text))]
    return re.sub("\x00+", "***", "".join("\x00" if c else text[i] for i, c in enumerate(covered)))


def _unsupported(asked: Asked, said: Complaint) -> str | None:
    if said.status not in (400, 404, 415, 422, 500, 501) or not asked.carried:
        return None
    if said.status != 415 and not _REFUSES.search(said.text):
        return None
    carried = asked.carried - {"tool_calling"} if _ONE_TOOL.search(said.text) else asked.carried
    named = next((what for what, words in _ABOUT.items() if what in carried and words.search(said.text)), None)
    parts = carried - {"tool_calling"}
    if named or len(parts) != 1:
        return named
    return min(parts) if said.status == 415 or "content" in said.text.lower() else None


def _quote(message: str, key: str) -> str:
    # The key goes before the text is cut, so that no half of it is left at the edge.
    shown = one_line(without_key(message[:4000], key), _QUOTED).rstrip(".")
    return f' saying "{shown}"' if shown else ""


def _cause(error: BaseException) -> str:
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
    """Gateways put the words of the service behind them one level down."""
    inner = [error.get(key) for key in ("metadata", "innererror", "details", "detail")]
    return " ".join(str(value)[:2000] for value in inner if isinstance(value, Mapping | list))


def _without_markup(text: str) -> str:
    return " ".join(re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", text[:20_000], flags=re.S | re.I).split())
