"""Errors about the context window: the numbers that they name."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from coterie.llm.providers.errors import RequestContext, classify, parse_error_body
from coterie.llm.service import ContextTooLong


@pytest.mark.parametrize(
    ("error", "limit", "sent"),
    [
        ("This model's maximum context length is 8192 tokens, your messages resulted in 9001 tokens.", 8192, 9001),
        ("request (8521 tokens) exceeds the available context size (4096 tokens), try increasing it", 4096, 8521),
        ({"message": "exceeds the context size", "n_ctx": 4096, "n_prompt_tokens": 5000}, 4096, 5000),
        ("prompt is too long: 210000 tokens > 200000 maximum", 200_000, 210_000),
        ("The input token count (200000) exceeds the maximum number of tokens allowed (131,072).", 131_072, 200_000),
        (
            "maximum context length is 4096 tokens, you requested 5000 tokens (904 in the messages, 4096 in the"
            " completion).",
            4096,
            None,
        ),
        ("the request exceeds the available context size, try increasing it", None, None),
        ("maximum context length is 10", None, None),
    ],
)
def test_the_numbers_of_an_error_about_the_context_window_are_read(
    error: str | dict[str, Any], limit: int | None, sent: int | None
) -> None:
    context = RequestContext(service="main", address="http://127.0.0.1:9/v1", model="m")
    response = parse_error_body(400, {"error": {"message": error} if isinstance(error, str) else error})
    found = classify(context, response, datetime(2030, 1, 1, tzinfo=UTC))
    assert isinstance(found, ContextTooLong)
    assert (found.limit, found.sent) == (limit, sent)
