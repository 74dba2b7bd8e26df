"""An MCP server on standard input and output, without the SDK, whose import takes most of a second.

Tests of the life cycle run a copy of this file. `SERVER` in `mcp_harness.py` is a server of the SDK.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

EXITS = Path(__file__).with_name("exits")
HANGS = "hangs"


def add(a: int, b: int) -> str:
    return str(a + b)


def pid() -> str:
    return str(os.getpid())


def greeting() -> str:
    return os.environ.get("GREETING", "none")


def refuse() -> str:
    raise ValueError("not allowed")


def hang() -> str:
    return HANGS


def die() -> str:
    with EXITS.open("a") as log:
        log.write("exited\n")
    os._exit(3)


def die_once() -> str:
    if not EXITS.exists():
        EXITS.touch()
        os._exit(3)
    return "alive"


def later() -> str:
    return "done later"


def ignore_signals(pipe: str) -> str:
    """Ignore SIGTERM and the end of standard input, and start a child that leaves the process group."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal, time; signal.signal(15, 1); "
    code += f"f = open({pipe!r}, 'w'); f.write('up'); f.flush(); time.sleep(600)"
    null = subprocess.DEVNULL
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdin=null, stdout=null)
    threading.Thread(target=time.sleep, args=(600,)).start()  # keeps this process alive after the end of its input
    return str(os.getpid())


TOOLS: dict[str, Any] = {
    tool.__name__: tool for tool in (add, pid, greeting, refuse, hang, die, die_once, later, ignore_signals)
}
EXECUTION = {"later": {"taskSupport": "required"}, "greeting": {"taskSupport": "optional"}}
ANNOTATIONS = {"add": {"readOnlyHint": True}, "die_once": {"idempotentHint": True}}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a request. None: it is never answered. `LookupError`: the method is unknown."""
    match method:
        case "initialize":
            info = {"name": "Demo", "version": "1"}
            return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            schema = {"type": "object"}
            return {
                "tools": [
                    {"name": name, "inputSchema": schema, "annotations": ANNOTATIONS.get(name, {})}
                    | ({"execution": EXECUTION[name]} if name in EXECUTION else {})
                    for name in TOOLS
                ]
            }
        case "tools/call":
            text = TOOLS[params["name"]](**params.get("arguments", {}))
            return None if text is HANGS else {"content": [{"type": "text", "text": text}]}
    raise LookupError(method)


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        reply = {"jsonrpc": "2.0", "id": request["id"]}
        try:
            result = answer(request["method"], request.get("params", {}))
        except LookupError as error:
            reply["error"] = {"code": -32601, "message": f"unknown method {error}"}
        except ValueError as error:
            reply["error"] = {"code": -32000, "message": str(error)}
        else:
            if result is None:
                continue
            reply["result"] = result
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    serve()
