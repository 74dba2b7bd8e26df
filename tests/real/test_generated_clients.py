"""Clients that other people's generators make from /openapi.json: complete, and without type errors."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from coterie.web.app import openapi_document
from tests.real.test_mcp_servers import CACHE, pypi

pytestmark = pytest.mark.real


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(openapi_document()))
    return path


def test_a_python_client_is_complete_and_has_no_type_error(document: Path, tmp_path: Path) -> None:
    generator = pypi("openapi-python-client", "attrs", "httpx", "mypy", "python-dateutil", "types-python-dateutil")
    target = tmp_path / "client"

    generated = run(generator, "generate", "--path", document, "--output-path", target, "--meta", "none")
    checked = run(generator.with_name("mypy"), "--no-error-summary", target)

    assert "WARNING" not in generated and "Unable" not in generated
    assert checked == ""
    names = {path.stem for path in (target / "api").rglob("*.py")}
    assert {"send_message", "upload_artifact", "get_usage", "cancel_response"} <= names


def test_types_for_typescript_compile(document: Path, tmp_path: Path) -> None:
    folder, npm = CACHE / "typescript", shutil.which("npm")
    assert npm, "npm is needed for this test: install Node.js"
    if not (folder / "node_modules").exists():
        folder.mkdir(parents=True, exist_ok=True)
        run(npm, "install", "--no-audit", "--no-fund", "--prefix", folder, "openapi-typescript@7", "typescript@5")
    target = tmp_path / "client.ts"

    run(folder / "node_modules" / ".bin" / "openapi-typescript", document, "-o", target)

    assert run(folder / "node_modules" / ".bin" / "tsc", "--noEmit", "--strict", target) == ""


def run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout
