"""What model services accept as a conversation, as strict as the strictest of them.

Each check gives the first complaint in the words of the service it stands for, or None where there is nothing to say.
A history that is fit for one should be fit for all: `responses_input` and `anthropic_body` ask other services what a
chat completions request asks.
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
