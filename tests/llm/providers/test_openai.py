"""OpenAI-compatible provider over real HTTP."""

from __future__ import annotations

import asyncio
import base64
import logging
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from coterie.llm.providers.openai import OpenAIService
from coterie.llm.routing import TOOL_FILES_NOTE
from coterie.llm.service import (
    AssistantMessage,
    Attachment,
    InlineFile,
    ModelRequest,
    PermanentError,
    Sampling,
    SystemMessage,
    TextDelta,
    TextPart,
    TokenUsage,
    ToolCall,
    ToolMessage,
    ToolSpec,
    TransientError,
    UnsupportedCapability,
    UserMessage,
)
from coterie.testing import model_faults
from coterie.testing.model_server import CachedAs, Calls, ModelServer, Says, Status

from .helpers import HELLO, KEY, LOOK_UP, ask, call, say, service, user

PNG = InlineFile(type="image", filename="a.png", mime_type="image/png", data=b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
MP3 = InlineFile(type="audio", filename="a.mp3", mime_type="audio/mpeg", data=b"ID3" + bytes(64))
PDF = InlineFile(type="file", filename="a.pdf", mime_type="application/pdf", data=b"%PDF-1.7 ")


@pytest.fixture
async def server() -> AsyncIterator[ModelServer]:
    async with ModelServer() as opened:
        yield opened


@pytest.fixture
async def main(server: ModelServer) -> AsyncIterator[OpenAIService]:
    opened = service(server.base_url)
    yield opened
    await opened.close()


async def sent(server: ModelServer, main: OpenAIService, *said: Any, tools: tuple[ToolSpec, ...] = (LOOK_UP,)) -> Any:
    """Return the messages that the server received."""
    outcome = await ask(main, ModelRequest(messages=said, tools=tools))
    assert outcome.answer, outcome.error
    return server.requests[-1].messages


async def test_text_streams_as_it_comes_and_the_answer_is_all_of_it(server: ModelServer, main: OpenAIService) -> None:
    gate = asyncio.Event()
    server.script(Says("One two three", gate=gate))
    pieces = main.generate(HELLO)
    asking = asyncio.ensure_future(anext(pieces))
    await server.wait_for_request()
    assert not asking.done()

    gate.set()
    deltas = [await asking] + [piece async for piece in pieces]

    answer = deltas.pop()
    assert "".join(piece.text for piece in deltas if isinstance(piece, TextDelta)) == "One two three"
    assert (answer.text, answer.service, answer.finish_reason) == ("One two three", "main", "stop")  # type: ignore[union-attr]


async def test_tool_calls_are_put_together_from_their_pieces(server: ModelServer, main: OpenAIService) -> None:
    arguments = {"city": "São Paulo", "days": [1, 2, 3], "note": "x" * 100}
    server.script(Says("Let me see.", (Calls("look_up", arguments, "a"), Calls("look_up", {}, "b"))))

    answer = await say(main)

    assert answer.text == "Let me see."
    assert answer.calls == (
        ToolCall(id="a", name="look_up", arguments=arguments),
        ToolCall(id="b", name="look_up", arguments={}),
    )
    assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_is_the_same_streamed_or_whole(stream: bool, server: ModelServer) -> None:
    main = service(server.base_url, stream=stream)
    server.script(Says("Hello there", (Calls("look_up", {"city": "Oslo"}, "a"),)))

    answer = await say(main)

    assert server.requests[0].body.get("stream", False) is stream
    assert (answer.text, answer.calls) == ("Hello there", (call("a", city="Oslo"),))
    assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0
    await main.close()


async def test_usage_is_read_from_the_stream(server: ModelServer, main: OpenAIService) -> None:
    usage = {"prompt_tokens": 12, "completion_tokens": 34}
    server.script(
        model_faults.events({"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}, {"usage": usage})
    )

    assert (await say(main)).usage == TokenUsage(input_tokens=12, output_tokens=34)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("server_kind", get_args(CachedAs))
async def test_cached_tokens_are_read_as_each_kind_of_server_reports_them(
    server_kind: CachedAs, stream: bool, server: ModelServer
) -> None:
    main = service(server.base_url, stream=stream)
    server.script(Says("hello", cached_tokens=32, cached_as=server_kind), "without a cache")

    usage = (await say(main)).usage

    assert (usage.cached_tokens, usage.input_tokens > 32) == (32, True)
    assert (await say(main)).usage.cached_tokens == 0
    await main.close()


@pytest.mark.parametrize(
    ("details", "cached"),
    [({"cached_tokens": 99}, 12), ({"cached_tokens": "9"}, 0), ({"cached_tokens": None}, 0), (7, 0)],
)
async def test_cached_tokens_are_never_more_than_the_input(
    details: object, cached: int, server: ModelServer, main: OpenAIService
) -> None:
    usage = {"prompt_tokens": 12, "completion_tokens": 34, "prompt_tokens_details": details}
    server.script(
        model_faults.events({"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}, {"usage": usage})
    )

    assert (await say(main)).usage == TokenUsage(input_tokens=12, output_tokens=34, cached_tokens=cached)


@pytest.mark.parametrize("usage", [None, [], {"prompt_tokens": -1}, {"prompt_tokens": "7"}, {"prompt_tokens": 10**30}])
async def test_invalid_usage_counts_as_zero(usage: object, server: ModelServer, main: OpenAIService) -> None:
    server.script(
        model_faults.events({"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}], "usage": usage})
    )

    assert (await say(main)).usage == TokenUsage()


async def test_consecutive_user_messages_are_merged(server: ModelServer, main: OpenAIService) -> None:
    messages = await sent(server, main, SystemMessage("Be brief."), user("One"), user("Two", "three"))

    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One\n\nTwo\n\nthree"},
    ]


async def test_empty_texts_are_left_out(server: ModelServer, main: OpenAIService) -> None:
    messages = await sent(server, main, user("One"), AssistantMessage(" \n"), user("", "Two"))

    assert messages == [{"role": "user", "content": "One\n\nTwo"}]


async def test_calls_and_results_keep_their_order_and_ids(server: ModelServer, main: OpenAIService) -> None:
    plan = AssistantMessage("", (call("a", city="Oslo"), call("b", city="Rome")))

    messages = await sent(
        server, main, user("Weather?"), plan, ToolMessage("a", "cold"), ToolMessage("b", ""), user("Thanks")
    )

    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user"]
    assert messages[1]["content"] is None
    assert [one["id"] for one in messages[1]["tool_calls"]] == ["a", "b"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "look_up", "arguments": '{"city":"Oslo"}'}
    assert messages[3] == {"role": "tool", "tool_call_id": "b", "content": ""}


async def test_attachments_go_out_as_the_providers_own_parts_byte_for_byte(
    server: ModelServer, main: OpenAIService
) -> None:
    (message,) = await sent(server, main, UserMessage((TextPart("Look:"), PNG, MP3, PDF)))

    text, image, audio, file = message["content"]
    assert text == {"type": "text", "text": "Look:"}
    assert image == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_base64(PNG)}"}}
    assert audio == {"type": "input_audio", "input_audio": {"data": _base64(MP3), "format": "mp3"}}
    assert file["file"] == {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{_base64(PDF)}"}


async def test_an_attachment_in_a_request_is_a_type_error(main: OpenAIService) -> None:
    reference = Attachment(artifact_ref="r", type="image", filename="a.png", mime_type="image/png", size=1)

    with pytest.raises(TypeError, match="CapabilityRouter"):
        await ask(main, ModelRequest(messages=(UserMessage((reference,)),)))


async def test_past_calls_become_text_in_a_request_without_tools(server: ModelServer, main: OpenAIService) -> None:
    plan = AssistantMessage("I look.", (call("a", city="Oslo"),))

    messages = await sent(server, main, user("Weather?"), plan, ToolMessage("a", "cold"), user("Thanks"), tools=())

    assert messages == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": 'I look.\n\n[called look_up with {"city":"Oslo"}]'},
        {"role": "user", "content": '{"toolResult": {"tool": "look_up", "result": "cold"}}\n\nThanks'},
    ]


async def test_a_tool_name_that_the_api_does_not_allow_is_converted_and_restored(
    server: ModelServer, main: OpenAIService
) -> None:
    tool = ToolSpec(name="files.read file", description="", parameters={"type": "object"})
    server.script(Says(calls=(Calls("files_read_file"), Calls("天气"))))

    answer = await say(main, ModelRequest(messages=(user("Read."),), tools=(tool,)))

    assert [one.name for one in answer.calls] == ["files.read file", "天气"]
    results = [ToolMessage(one.id, "?") for one in answer.calls]
    messages = await sent(server, main, user("Read."), AssistantMessage("", answer.calls), *results, tools=(tool,))
    assert [one["function"]["name"] for one in messages[1]["tool_calls"]] == ["files_read_file", "__"]


@pytest.mark.parametrize(
    ("capability", "request_", "what"),
    [
        ("vision", ModelRequest(messages=(UserMessage((TextPart("?"), PNG)),)), "vision"),
        ("audio", ModelRequest(messages=(UserMessage((TextPart("?"), MP3)),)), "audio"),
        ("file", ModelRequest(messages=(UserMessage((TextPart("?"), PDF)),)), "file"),
        ("tool_calling", HELLO, "tool_calling"),
    ],
)
async def test_a_service_that_refuses_a_kind_of_content_says_which(
    capability: str, request_: ModelRequest, what: str
) -> None:
    able = {"vision", "audio", "file", "tool_calling"} - {capability}
    async with ModelServer(capabilities=able) as server:
        main = service(server.base_url)

        error = (await ask(main, request_)).error

        assert isinstance(error, UnsupportedCapability) and error.capability == what
        assert len(server.requests) == 1
        await main.close()


SEES = ModelRequest(messages=(UserMessage((TextPart("?"), PNG)),), tools=(LOOK_UP,))


@pytest.mark.parametrize(
    ("status", "message", "request_", "what"),
    [
        (400, "registry.ollama.ai/library/gemma:2b does not support tools", SEES, "tool_calling"),
        (400, '"auto" tool choice requires --enable-auto-tool-choice to be set', HELLO, "tool_calling"),
        (404, "No endpoints found that support tool use", HELLO, "tool_calling"),
        (404, "No endpoints found that support image input", SEES, "vision"),
        (422, "messages[0]: unknown variant `image_url`, expected `text`", SEES, "vision"),
        (500, "image input is not supported - hint: you may need to provide the mmproj", SEES, "vision"),
        (400, "messages[0].content must be a string", SEES, "vision"),
        (415, "Unsupported Media Type", SEES, "vision"),
    ],
)
async def test_real_error_messages_are_classified(
    status: int, message: str, request_: ModelRequest, what: str, server: ModelServer, main: OpenAIService
) -> None:
    server.script(Status(status, message))

    error = (await ask(main, request_)).error

    assert isinstance(error, UnsupportedCapability) and error.capability == what, error


@pytest.mark.parametrize(
    "message",
    [
        "image input is not supported",
        "Invalid schema for function 'look_up': 'pattern' is not supported in tools[0]",
        "tool_call_id is not allowed here",
    ],
)
async def test_a_refusal_of_content_that_was_not_sent_is_a_bad_request(
    message: str, server: ModelServer, main: OpenAIService
) -> None:
    server.script(Status(400, message))

    error = (await ask(main, HELLO)).error

    assert isinstance(error, PermanentError) and error.category == "request"


@pytest.mark.parametrize("refused", ["stream_options"])
async def test_a_service_that_does_not_know_usage_in_streams_is_asked_without_from_then_on(refused: str) -> None:
    async with ModelServer(unknown_keys={refused}) as server:
        main = service(server.base_url)

        assert (await say(main)).text == (await say(main)).text == "ok"

        assert [refused in one.body for one in server.requests] == [True, False, False]
        await main.close()


async def test_a_service_with_a_newer_name_for_the_limit_is_asked_by_that_name(server: ModelServer) -> None:
    main = service(server.base_url, sampling=Sampling(max_tokens=77))
    server.script(Status(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."))

    await say(main)

    assert [one.body.get("max_tokens") for one in server.requests] == [77, None]
    assert server.requests[1].body["max_completion_tokens"] == 77
    await main.close()


async def test_a_service_that_repeats_an_error_is_asked_a_limited_number_of_times(
    server: ModelServer, main: OpenAIService
) -> None:
    server.default = Status(400, "stream_options max_completion_tokens roles must alternate, system role not supported")

    assert isinstance((await ask(main)).error, PermanentError)

    assert len(server.requests) == 5  # once, and once for each thing it may want differently


async def test_a_service_with_strict_alternation_gets_alternating_messages() -> None:
    said = (
        SystemMessage("Be brief."),
        AssistantMessage("Welcome."),
        user("Weather?"),
        AssistantMessage("", (call("a"),)),
        ToolMessage("a", "cold"),
        user("Never mind."),
        AssistantMessage("All right."),
        AssistantMessage("Anything else?"),
    )
    async with ModelServer(alternate=True) as server:
        main = service(server.base_url)

        await say(main, ModelRequest(messages=said, tools=(LOOK_UP,)))
        await say(main, ModelRequest(messages=said, tools=(LOOK_UP,)))

        assert len(server.requests) == 3, "it is learnt once"
        roles = [message["role"] for message in server.requests[-1].messages]
        assert roles == [
            "system",
            "user",
            "assistant",
            "user",
            "assistant",
            "tool",
            "assistant",
            "user",
            "assistant",
            "user",
        ]
        await main.close()


async def test_a_service_with_strict_alternation_gets_the_files_of_results_after_an_answer() -> None:
    files = UserMessage((TextPart(TOOL_FILES_NOTE), PNG))
    said = (user("Weather?"), AssistantMessage("", (call("a"),)), ToolMessage("a", "cold"), files)
    async with ModelServer(alternate=True) as server:
        main = service(server.base_url)

        await say(main, ModelRequest(messages=said, tools=(LOOK_UP,)))

        roles = [message["role"] for message in server.requests[-1].messages]
        assert roles == ["user", "assistant", "tool", "assistant", "user"]
        assert server.requests[-1].messages[3]["content"] == "(I look at the files of the results.)"
        await main.close()


async def test_a_service_without_a_system_role_gets_the_text_as_a_user_message(
    server: ModelServer, main: OpenAIService
) -> None:
    server.script(Status(400, "System role not supported"))

    await say(main)

    assert server.requests[1].messages == [{"role": "user", "content": "Be brief.\n\nHello"}]


async def test_the_key_is_only_in_its_header(
    server: ModelServer, main: OpenAIService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    await say(main)

    assert server.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert KEY not in caplog.text and KEY not in repr(main) and KEY.encode() not in server.requests[0].raw


async def test_a_missing_key_error_says_where_to_set_the_key(server: ModelServer) -> None:
    main = service(server.base_url, api_key="", key_name="")
    server.script(Status(401, "no key"))

    assert str((await ask(main)).error) == 'service "main" wants a key (401): edit apiKey in llmservices.json'
    assert "authorization" not in server.requests[0].headers
    await main.close()


async def test_a_wrong_key_address_or_model_gives_one_sentence_that_says_what_to_fix() -> None:
    async with ModelServer(api_key="right", models={"good"}) as server:
        wrong_key = service(server.base_url, api_key="wrong-key-wrong")
        wrong_model = service(server.base_url, api_key="right", model="bad")
        key, model = (await ask(wrong_key)).error, (await ask(wrong_model)).error
        await wrong_key.close()
        await wrong_model.close()
        url = server.base_url
    dead = service(url)
    address = (await ask(dead)).error
    await dead.close()

    assert str(key) == 'service "main" refused the key (401): set MAIN_API_KEY or edit apiKey in llmservices.json'
    assert str(model) == (
        f'service "main" does not know the model "bad" at {url} (404) saying "The model `bad` does not exist": '
        "check model and baseURL in llmservices.json"
    )
    assert str(address) == (
        f'service "main" cannot be reached at {url} (connection refused): '
        "check that it runs, and baseURL in llmservices.json"
    )


async def test_an_address_may_carry_a_query(server: ModelServer) -> None:
    main = service(f"{server.base_url}/?api-version=7")

    await ask(main)

    assert server.requests[0].path == "/v1/chat/completions?api-version=7"
    await main.close()


async def test_secrets_in_an_address_are_not_shown() -> None:
    main = service("http://user:hunter2@127.0.0.1:1/v1?key=hunter3")

    assert "hunter" not in str((await ask(main)).error)
    await main.close()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed certificate with its key in the same file."""
    openssl = shutil.which("openssl")
    if not openssl:
        pytest.skip("there is no openssl to create a certificate")
    made, name = tmp_path / "both.pem", "subjectAltName=IP:127.0.0.1"
    command = [openssl, "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    more = ["-subj", "/CN=x", "-addext", name, "-keyout", str(made), "-out", str(tmp_path / "cert.pem")]
    subprocess.run([*command, *more], check=True, capture_output=True)
    made.write_text(made.read_text() + (tmp_path / "cert.pem").read_text())
    return made


@pytest.mark.parametrize("trusted", [False, True])
async def test_a_service_behind_tls_is_asked_only_if_its_certificate_is_trusted(
    trusted: bool, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"choices": [{"message": {"content": "ok"}}]}'
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setattr("coterie.llm.providers.openai._ssl_context", httpx.create_ssl_context)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as listening:
        main = service(f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1")

        outcome = await ask(main)

        await main.close()
    if trusted:
        assert outcome.answer and outcome.answer.text == "ok"
    else:
        assert isinstance(outcome.error, TransientError) and "CERTIFICATE_VERIFY_FAILED" in str(outcome.error)


async def test_a_connection_that_the_server_closed_is_not_used_again(server: ModelServer, main: OpenAIService) -> None:
    server.script(Says("first"), Says("second"))
    await say(main)
    await server.close_connections()

    assert (await say(main)).text == "second"


async def test_a_connection_serves_again(server: ModelServer, main: OpenAIService) -> None:
    for _ in range(3):
        await say(main)

    assert server.connections == 1


async def test_many_requests_share_a_service(server: ModelServer, main: OpenAIService) -> None:
    answers = await asyncio.gather(*(say(main) for _ in range(150)))

    assert {answer.text for answer in answers} == {"ok"}


async def test_a_closed_service_opens_again_when_it_is_asked(server: ModelServer, main: OpenAIService) -> None:
    await say(main)
    await main.close()
    await main.close()

    assert (await say(main)).text == "ok"


def _base64(part: InlineFile) -> str:
    return base64.b64encode(part.data).decode()
