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


def test_every_public_name_can_be_imported() -> None:
    import coterie

    assert all(getattr(coterie, name) is not None for name in coterie.__all__)
    with pytest.raises(AttributeError):
        coterie.nothing_of_the_kind  # noqa: B018


def test_no_module_uses_eval_pickle_or_object_loading() -> None:
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
        "llm/providers/a2a.py",  # [remote.…] card of coterie.toml
        "web/a2a/push.py",  # [doors] push of coterie.toml
        "cli/client.py",  # the server of the running society
    }
    openers = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if client.search(path.read_text())}
    assert openers == {"agent/mcp_connection.py"}  # [mcp.…] url of coterie.toml


def test_no_sql_is_made_from_values() -> None:
    """SQL strings contain constants (upper-case names) only; values are named parameters."""
    wrong = []
    for path in (PACKAGE / "stores").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Constant | ast.JoinedStr):
                continue
            text, parts = _literal_text(node)
            if re.match(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b", text):
                wrong += [f"{path.name}:{node.lineno} {part}" for part in parts if not _is_constant(part)]
                wrong += [f"{path.name}:{node.lineno} ?" for mark in re.findall(r"'[^']*'|\?", text) if mark == "?"]
    assert wrong == []


def test_no_sql_is_made_from_words_of_other_sql() -> None:
    """Statements are written out: no `replace` or `format` of a constant."""
    wrong = []
    for path in (PACKAGE / "stores").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("replace", "format", "format_map"):
                source = ast.unparse(node.value)
                if source.isupper() or re.match(r"f?['\"]+\s*(SELECT|INSERT|UPDATE|DELETE|WITH)\b", source):
                    wrong.append(f"{path.name}:{node.lineno} {source}")
    assert wrong == []


def _literal_text(node: ast.Constant | ast.JoinedStr) -> tuple[str, list[str]]:
    """The literal text of a string, and the expressions that an f-string inserts into it."""
    if isinstance(node, ast.Constant):
        return str(node.value), []
    text = "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
    return text, [ast.unparse(part.value) for part in node.values if isinstance(part, ast.FormattedValue)]


def _is_constant(expression: str) -> bool:
    # Table and columns of the bulk INSERT, and the fields of `Mailbox` and `TaskChange` that an UPDATE sets.
    generated = ("into", "columns", "table", "', '.join([row] * size)", "sets")
    return expression.isupper() or expression in generated
