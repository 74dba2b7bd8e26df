"""Strict validators of the requests that model APIs accept.

Each check returns the first error in the service's own words, or None. A valid history should be valid for all APIs:
`responses_input` and `anthropic_body` convert a chat completions request.
"""

from coterie.testing.dialects.anthropic import anthropic_body, check_anthropic
from coterie.testing.dialects.chat import check_openai_chat, check_strict_alternation
from coterie.testing.dialects.responses import check_openai_responses, responses_input

__all__ = [
    "anthropic_body",
    "check_anthropic",
    "check_openai_chat",
    "check_openai_responses",
    "check_strict_alternation",
    "responses_input",
]
