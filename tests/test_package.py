"""Rules for the whole package: imports, forbidden modules, outgoing connections, SQL strings."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "coterie"


def test_importing_coterie_opens_nothing_and_loads_neither_server_nor_cli() -> None:
    script = (
        "import sys, coterie; print([m for m in ('typer', 'httpx', 'sqlite3', 'asyncio', 'rich') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    import coterie

    assert all(getattr(coterie, name) is not None for name in coterie.__all__)
    with pytest.raises(AttributeError):
        coterie.nothing_of_the_kind  # noqa: B018


def test_nothing_is_evaluated_unpickled_or_revived() -> None:
    forbidden = re.compile(r"\b(pickle|marshal|shelve|yaml\.load)\b|(?<![\w.])(eval|exec)\(")
    found = [path for path in PACKAGE.rglob("*.py") if forbidden.search(path.read_text())]
    assert found == []


def test_only_addresses_of_the_owner_are_contacted() -> None:
    """Only these modules can open connections, and only to addresses that the owner configured."""
    speaks = re.compile(r"\b(import|from) (httpx|requests|aiohttp|urllib\.request|http\.client|websockets)\b")
    client = re.compile(r"follow_redirects\s*=\s*True|streamable_http_client\(")
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if speaks.search(path.read_text())}
    assert found == {
        "llm/providers/openai.py",  # baseURL of llmservices.json
        "llm/providers/http_transport.py",
        "llm/discovery.py",  # servers on this machine, when the setup page looks for them
        "cli/client.py",  # the running society
    }
    openers = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if client.search(path.read_text())}
    assert openers == {"agent/mcp_connection.py"}  # [mcp.…] url of coterie.toml


def test_no_sql_is_made_from_values() -> None:
    """SQL strings may contain constants (upper-case names) only."""
    wrong = []
    for path in (PACKAGE / "stores").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.JoinedStr):
                continue
            text = "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
            parts = [ast.unparse(part.value) for part in node.values if isinstance(part, ast.FormattedValue)]
            if re.match(r"\s*(SELECT|INSERT|UPDATE|DELETE)\b", text):
                wrong += [f"{path.name}:{node.lineno} {part}" for part in parts if not _is_constant(part)]
    assert wrong == []


def _is_constant(expression: str) -> bool:
    # Local names that are built from literals a few lines above their use.
    local = ("is_due", "placeholders", "into", "sets", "', '.join([row] * size)", "', '.join(MAILBOX_COLUMNS)")
    return expression.isupper() or expression in local
