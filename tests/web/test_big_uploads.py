from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from .conftest import TOKEN

MB = 1_000_000
GIGABYTE = 1_000 * MB


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_an_upload_of_a_gigabyte_over_the_limit_uses_neither_memory_nor_disk(tmp_path: Path) -> None:
    sent = 0

    def body() -> Iterator[bytes]:
        nonlocal sent
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        while sent < GIGABYTE:
            sent += MB
            yield b"x" * MB

    folder = tmp_path / "home"
    command = [sys.executable, "-m", "tests.web.upload_child", str(folder), TOKEN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        url = f"http://127.0.0.1:{int(child.stdout.readline())}/api/v1/artifacts"
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "multipart/form-data; boundary=b"}
        answer = httpx.post(url, content=body(), headers=headers, timeout=60)
        child.stdin.write("\n")
        child.stdin.flush()
        grown = int(child.stdout.readline())

    assert (answer.status_code, answer.json()["code"]) == (413, "artifact_too_large")
    assert grown < 50 * MB
    kept = [path for path in (folder / "data" / "artifacts").rglob("*") if path.is_file()]
    assert kept == []
