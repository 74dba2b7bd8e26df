"""A society in a temporary folder with a stand-in model server, so that the examples run without a key.

With your own models you do not need this module: add the models to llmservices.json.
"""

import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from coterie import Society
from coterie.testing import ModelServer

PICTURE = bytes.fromhex(  # one pixel, PNG
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c4944415408d763f8cfc000000301010018dd8db00000000049454e44ae426082"
)


@asynccontextmanager
async def society(agents: str, **services: list[str]) -> AsyncIterator[tuple[Society, ModelServer]]:
    """`agents`: text of coterie.toml. `services`: input capabilities by service id."""
    async with ModelServer() as server:
        entries = [
            {"id": name, "baseURL": server.base_url, "model": name, "capabilities": {"input": reads, "output": SAYS}}
            for name, reads in (services or {"main": ["text"]}).items()
        ]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "coterie.toml").write_text(agents)
            Path(folder, "llmservices.json").write_text(json.dumps({"services": entries}))
            async with Society.open(folder) as opened:
                yield opened, server


SAYS = ["text", "tool_calling"]
