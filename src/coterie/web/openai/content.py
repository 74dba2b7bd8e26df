"""Content of OpenAI's messages: parts become text and files, a conversation becomes one message, an answer one text."""

from __future__ import annotations

import base64
import binascii
import hashlib
import mimetypes
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec

from coterie.errors import Refused
from coterie.messages import Message
from coterie.text import one_line

INSTRUCTIONS = "Instructions from the program:\n"
"""Begins a message that carries a new system message of the client."""
TRANSCRIPT = "The program brings an earlier conversation:\n\n"
SYSTEM_ROLES = frozenset({"system", "developer"})
ROLES = SYSTEM_ROLES | {"user", "assistant", "tool", "function"}
_encode = msgspec.json.Encoder(order="deterministic").encode


class File(msgspec.Struct, frozen=True):
    name: str
    data: bytes


class ClientMessage(msgspec.Struct, frozen=True):
    """One message of the client's list."""

    role: str
    text: str
    files: tuple[File, ...]
    digest: bytes
    """Of role and content as they were sent."""


def read_message(value: Any, path: str) -> ClientMessage:
    """Decode a message of a chat, or an input item of a response. `path`: where it is in the request, for errors."""
    if not isinstance(value, dict):
        raise _invalid(path, "expected an object with role and content")
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise _invalid(f"{path}.role", f"expected one of {', '.join(sorted(ROLES))}")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if parts is None and role == "assistant":
        parts = []  # it only called tools
    if not isinstance(parts, list):
        raise _invalid(f"{path}.content", "expected a text or a list of parts")
    texts, files = list[str](), list[File]()
    for index, part in enumerate(parts):
        found = _read_part(part, f"{path}.content[{index}]", len(files))
        if isinstance(found, File):
            files.append(found)
        else:
            texts.append(found)
    digest = hashlib.sha256(_encode([role, parts])).digest()
    return ClientMessage(str(role), "\n".join(texts), tuple(files), digest)


def _read_part(part: Any, path: str, number: int) -> str | File:
    if not isinstance(part, dict):
        raise _invalid(path, "expected an object with a type")
    match part.get("type"):
        case "text" | "input_text" | "output_text" | "refusal":
            text = part.get("refusal" if part["type"] == "refusal" else "text")
            if not isinstance(text, str):
                raise _invalid(f"{path}.text", "expected a text")
            return text
        case "image_url" | "input_image":
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, dict) else image
            return _read_data_url(url, f"{path}.image_url", f"picture-{number + 1}")
        case "input_audio":
            audio = part.get("input_audio")
            if not isinstance(audio, dict) or not isinstance(audio.get("data"), str):
                raise _invalid(f"{path}.input_audio", "expected data in base64, and its format")
            name = f"sound-{number + 1}.{one_line(str(audio.get('format') or 'bin'))}"
            return File(name, _from_base64(audio["data"], f"{path}.input_audio.data"))
        case "file" | "input_file":
            file = part.get("file") if part["type"] == "file" else part
            if not isinstance(file, dict) or not isinstance(file.get("file_data"), str):
                raise _invalid(f"{path}.file_data", "expected the file itself, as a data: URL or in base64")
            name = file.get("filename") or f"file-{number + 1}"
            data = file["file_data"]
            if data.startswith("data:"):
                return File(str(name), _read_data_url(data, f"{path}.file_data", "").data)
            return File(str(name), _from_base64(data, f"{path}.file_data"))
    raise _invalid(f"{path}.type", "expected text, image_url, input_audio, file or their input_… forms")


def _read_data_url(url: Any, path: str, name: str) -> File:
    if not isinstance(url, str) or not url.startswith("data:"):
        # The server contacts no addresses that a request names.
        raise _invalid(path, "expected the content itself as a data: URL: Coterie loads nothing from other addresses")
    head, _, data = url[5:].partition(",")
    media_type, *options = head.split(";")
    extension = mimetypes.guess_extension(media_type) or ""
    if "base64" in options:
        return File(name + extension, _from_base64(data, path))
    return File(name + extension, unquote_to_bytes(data))


def _from_base64(data: str, path: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise _invalid(path, "not valid base64") from None


def _invalid(path: str, message: str) -> Refused:
    return Refused("payload_invalid", f"{path}: {message}", param=path)


# What is sent to the agent


def render_new(new: Sequence[ClientMessage], instructions: str) -> str:
    """The text of the message to the agent: the new messages, after `instructions` that it does not know yet."""
    head = f"{INSTRUCTIONS}{instructions}\n\n" if instructions else ""
    if all(message.role == "user" for message in new):
        return head + "\n\n".join(message.text for message in new if message.text)
    lines = [f"{message.role}: {message.text}" for message in new[:-1]]
    last = new[-1]
    lines.append(last.text if last.role == "user" else f"{last.role}: {last.text}")
    return head + TRANSCRIPT + "\n\n".join(lines)


def instructions_of(message: Message) -> str | None:
    """The beginning of a message that carries instructions; None if it carries none."""
    text = str(message.payload.get("text", ""))
    return text if text.startswith(INSTRUCTIONS) else None


# What the client gets


def answer_text(message: Message, agent_id: str) -> str:
    """The text of a message to the person, as the client shows it: quick replies are a numbered list."""
    text = str(message.payload.get("text", ""))
    if message.sender != agent_id:
        text = f"[{message.sender}] {text}"
    blocks = [text] if text else []
    if options := message.payload.get("quickReplies"):
        blocks.append("\n".join(f"{number}. {option}" for number, option in enumerate(options, 1)))
    for file in message.payload.get("attachments") or ():
        blocks.append(f"File: {file.get('filename')} ({file.get('mimeType')}, {file.get('artifactRef')})")
    return "\n\n".join(blocks)


def extra_fields(messages: Sequence[Message], task: str, state: str) -> dict[str, Any]:
    """The field `coterie` of an answer: what OpenAI's format has no fields for."""
    last: Mapping[str, Any] = messages[-1].payload if messages else {}
    files = [file for message in messages for file in message.payload.get("attachments") or ()]
    return {
        "task": task,
        "state": state,
        "messages": [message.id for message in messages],
        "quick_replies": list(last.get("quickReplies") or ()),
        "question": messages[-1].id if last.get("quickReplies") else None,
        "files": files,
    }


def chosen_option(text: str, options: Sequence[str]) -> int | None:
    """The quick reply that a text chooses: its number in the list, or its words."""
    said = text.strip()
    number = said.removesuffix(".")
    if len(number) <= 2 and number.isascii() and number.isdecimal() and 1 <= int(number) <= len(options):
        return int(number) - 1
    matches = [index for index, option in enumerate(options) if option.strip().casefold() == said.casefold()]
    return matches[0] if len(matches) == 1 else None
