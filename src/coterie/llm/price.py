"""The price of a model service and the cost of a request.

A price is per million tokens. A cost is a whole number of billionths of the currency, so that sums are exact.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from coterie.llm.json_node import MAX_SAFE_INTEGER, JsonNode, is_number
from coterie.llm.service import TokenUsage

BILLION = 1_000_000_000
DEFAULT_CURRENCY = "USD"
MAX_PRICE = 1_000_000_000
"""No real price is higher; it keeps a wrong one from overflowing a sum."""
_KEYS = ("input", "cachedInput", "output", "currency")
_CURRENCY = re.compile(r"[A-Z]{3}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a service charges per million tokens."""

    input: float
    cached_input: float
    """For input tokens that the service had in its cache."""
    output: float
    currency: str = DEFAULT_CURRENCY

    def cost(self, usage: TokenUsage) -> int:
        """Return the cost of a request in billionths of the currency, at most `MAX_SAFE_INTEGER`."""
        cached = min(usage.cached_tokens, usage.input_tokens)
        parts = (
            (usage.input_tokens - cached, self.input),
            (cached, self.cached_input),
            (usage.output_tokens, self.output),
        )
        # Whole trillionths: a price such as 0.0375 is no whole number of billionths per token.
        trillionths = sum(tokens * round(price * 1_000_000) for tokens, price in parts)
        return min((trillionths + 500) // 1_000, MAX_SAFE_INTEGER)

    def to_dict(self) -> dict[str, Any]:
        return {
            "input": self.input,
            "cachedInput": self.cached_input,
            "output": self.output,
            "currency": self.currency,
        }


def read_price(node: JsonNode) -> Price | None:
    """Return the price; None if there is none or it is wrong. A wrong price would give wrong costs."""
    if node.value is None or not node.is_object(_KEYS):
        return None
    given = node.child("cachedInput")
    amount, output = _amount(node.child("input")), _amount(node.child("output"))
    cached = amount if given.value is None else _amount(given)
    currency = _currency(node.child("currency"))
    if amount is None or cached is None or output is None or currency is None:
        return None
    return Price(input=amount, cached_input=cached, output=output, currency=currency)


def _amount(node: JsonNode) -> float | None:
    if is_number(node.value, MAX_PRICE):
        return float(node.value)
    node.report_expected("expected_price")
    return None


def _currency(node: JsonNode) -> str | None:
    if node.value is None:
        return DEFAULT_CURRENCY
    if isinstance(node.value, str) and _CURRENCY.fullmatch(node.value):
        return node.value
    node.report_expected("expected_currency")
    return None
