"""Processor time of a client that receives 200 streams at once.

The stand-in server runs in its own process. Our provider is compared with the openai SDK, which runs in a separate
environment made with uv.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.peers import ROOT, environment
from bench.report import Report, settle

STREAMS = 200
TOKENS_PER_SECOND = 50
SECONDS = 10
PROMPT = "Talk to me."


def run() -> None:
    report = Report("streams")
    with tempfile.TemporaryDirectory(prefix="bench-streams-") as folder:
        peer_python = environment(Path(folder), "openai")
        ours = listen(report, "coterie", sys.executable, at_most=1)
        peer = listen(report, "openai sdk", peer_python)
    report.ratio("processor per token, coterie over openai sdk", ours, peer)


def listen(report: Report, client: str, python: str, at_most: float | None = None) -> float:
    """Processor seconds per token of a client in its own process. One that cannot keep up takes longer than SECONDS."""
    settle()
    server = subprocess.Popen(_command(sys.executable, "server"), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        done = subprocess.run(_command(python, client, url), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        server.terminate()
        server.wait()
    found = json.loads(done.stdout)
    each = float(found["cpu"]) / int(found["tokens"])
    report.line(f"{client}: tokens", found["tokens"], "tokens")
    report.line(f"{client}: wall", found["wall"], "s")
    report.line(f"{client}: processor", found["cpu"] / found["wall"], "cores", at_most=at_most)
    report.line(f"{client}: processor per token", each * 1e6, "us")
    return each


async def serve() -> None:
    from coterie.testing.model_server import ModelServer, Says

    async with ModelServer() as server:
        server.default = Says("token " * (TOKENS_PER_SECOND * SECONDS), token_delay=1 / TOKENS_PER_SECOND)
        print(server.base_url, flush=True)
        await asyncio.Event().wait()


async def measure(client: Callable[[str], Awaitable[list[int]]], url: str) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    counts = await client(url)
    print(json.dumps({"tokens": sum(counts), "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}))


async def ours(url: str) -> list[int]:
    from coterie.llm.providers.openai import OpenAIService
    from coterie.llm.service import Completion, ModelRequest, TextPart, UserMessage

    service = OpenAIService(id="bench", base_url=url, model="m")
    request = ModelRequest(messages=(UserMessage((TextPart(PROMPT),)),))

    async def read_stream() -> int:
        pieces = [piece async for piece in service.generate(request)]
        return sum(len(piece.text.split()) for piece in pieces if not isinstance(piece, Completion))

    counts = await asyncio.gather(*(read_stream() for _ in range(STREAMS)))
    await service.close()
    return counts


async def sdk(url: str) -> list[int]:
    client: Any = importlib.import_module("openai").AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    request = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "stream": True}

    async def read_stream() -> int:
        stream = await client.chat.completions.create(**request)
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        return sum(len(text.split()) for text in texts)

    counts = await asyncio.gather(*(read_stream() for _ in range(STREAMS)))
    await client.close()
    return counts


def _command(python: str, *arguments: str) -> list[str]:
    return [python, "-m", "bench.streams", *arguments]


def main(role: str = "", url: str = "") -> None:
    match role:
        case "server":
            asyncio.run(serve())
        case "coterie":
            asyncio.run(measure(ours, url))
        case "openai sdk":
            asyncio.run(measure(sdk, url))
        case _:
            run()


if __name__ == "__main__":
    main(*sys.argv[1:])
