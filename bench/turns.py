"""Cost of a turn: a model stub asks for one tool call and then answers.

The peers keep their history in memory (autogen-core) or in SQLite (openai-agents); ours is durable at every step.
Each runs in its own process. A new conversation starts every ten turns, so that histories stay short.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import logging
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from bench.peers import ask, environment
from bench.report import Report, best

TURNS = 200
TURNS_EACH = 10
CROWD = 1_000
IDLE = 100_000


def run() -> None:
    report = Report("turns")
    with tempfile.TemporaryDirectory(prefix="bench-turns-") as folder:
        agents = environment(Path(folder, "agents"), "openai-agents")
        autogen = environment(Path(folder, "autogen"), "autogen-core")
        figures = best(
            {
                "coterie, full sync": lambda: _ms(sys.executable, "full"),
                "coterie, relaxed": lambda: _ms(sys.executable, "relaxed"),
                "openai-agents, SQLiteSession": lambda: _ms(agents, "openai-agents"),
                "autogen-core, in memory": lambda: _ms(autogen, "autogen"),
            },
            pick=min,
        )
        crowds = best(
            {
                "coterie, 1,000 agents at once, full sync": lambda: _rate(sys.executable, "crowd"),
                "autogen-core, one after the other, in memory": lambda: _rate(autogen, "autogen"),
            }
        )
    for name, value in figures.items():
        report.line(f"{name}: a turn", value, "ms")
    full, relaxed, sessions, memory = figures.values()
    report.ratio("a durable turn over openai-agents with SQLiteSession", full, sessions, at_most=0.25)
    report.ratio("a relaxed turn over autogen-core in memory", relaxed, memory, at_most=2)
    for name, value in crowds.items():
        report.line(name, value, "turns/s")
    ours, theirs = crowds.values()
    report.ratio("1,000 agents at once over autogen-core in memory", ours, theirs, at_least=0.6)
    report.line(
        "an idle agent among 100,000", ask(sys.executable, "bench.turns", "idle")["bytes"], "bytes", at_most=600
    )


def _ms(python: str, who: str) -> float:
    return float(ask(python, "bench.turns", who)["seconds"]) * 1e3


def _rate(python: str, who: str) -> float:
    return 1 / float(ask(python, "bench.turns", who)["seconds"])


# Ours


def coterie(durability: str) -> Callable[[], Coroutine[Any, Any, float]]:
    async def measure() -> float:
        async with _society(durability, TURNS // TURNS_EACH + 1) as (society, rested):
            await _turns(society, rested, "a0")
            start = time.perf_counter()
            for number in range(1, TURNS // TURNS_EACH + 1):
                await _turns(society, rested, f"a{number}")
            return (time.perf_counter() - start) / TURNS

    return measure


async def crowd() -> float:
    async with _society("full", CROWD) as (society, rested):
        start = time.perf_counter()
        await asyncio.gather(*(society.send(to=f"a{number}", text="hi") for number in range(CROWD)))
        for _ in range(CROWD):
            await rested.get()
        return (time.perf_counter() - start) / CROWD


async def idle() -> float:
    """Memory of each idle agent."""
    async with _society("relaxed", 1) as (society, _):
        before = _resident()
        agent = importlib.import_module("coterie.agents").Agent
        profile = importlib.import_module("coterie.agents").Profile
        for first in range(0, IDLE, 1_000):
            names = [f"idle-{number}" for number in range(first, first + 1_000)]
            await society.store.add_agents([agent(id=name, name=name) for name in names])
            for name in names:
                society.agents.add(profile(id=name, name=name))
        return (_resident() - before) / IDLE


def _society(durability: str, agents: int) -> Any:
    """An open society with a stub model, and a queue that gets the agent of each finished turn."""
    from contextlib import asynccontextmanager

    from coterie import Society, agent_runtime
    from coterie.llm.service import Completion, ToolCall, ToolMessage
    from coterie.turn import Rest

    class Stub:
        id = "main"

        async def generate(self, request: Any) -> Any:
            if isinstance(request.messages[-1], ToolMessage):
                yield Completion(text="ok")
            else:
                yield Completion(text="", calls=(ToolCall(id="c1", name="add", arguments={"x": 1}),))

        async def close(self) -> None: ...

    @asynccontextmanager
    async def opened() -> Any:
        setattr(agent_runtime, "make_service", lambda *_: Stub())  # noqa: B010 - nothing else about it is a stub
        with tempfile.TemporaryDirectory() as folder:
            _write(Path(folder), durability, agents)
            async with Society.open(folder) as society:
                rested: asyncio.Queue[str] = asyncio.Queue()
                advance = society.store.advance

                async def watched(claim: Any, *arguments: Any, **more: Any) -> Any:
                    after = await advance(claim, *arguments, **more)
                    if isinstance(after.action, Rest):
                        rested.put_nowait(claim.agent_id)
                    return after

                society.store.advance = watched  # type: ignore[method-assign]
                gc.freeze()  # as `coterie serve` does after its start
                yield society, rested

    return opened()


def _write(folder: Path, durability: str, agents: int) -> None:
    names = "".join(f"[agents.a{number}]\n" for number in range(agents))
    (folder / "coterie.toml").write_text(f'[store]\ndurability = "{durability}"\n{names}')
    entry = {"id": "main", "baseURL": "http://127.0.0.1:9/v1", "model": "stub", "maxConcurrentRequests": CROWD}
    (folder / "llmservices.json").write_text(json.dumps({"services": [entry]}))
    (folder / "tools.py").write_text(
        'from coterie import tool\n\n\n@tool\nasync def add(x: int) -> str:\n    "Add."\n    return str(x)\n'
    )


async def _turns(society: Any, rested: asyncio.Queue[str], agent: str) -> None:
    for _ in range(TURNS_EACH):
        await society.send(to=agent, text="hi")
        await rested.get()


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# The peers


async def openai_agents() -> float:
    agents = importlib.import_module("agents")
    types = importlib.import_module("openai.types.responses")
    agents.set_tracing_disabled(True)

    class Stub(agents.Model):  # type: ignore[name-defined, misc]
        async def get_response(self, system_instructions: Any, input: Any, *_: Any, **__: Any) -> Any:  # noqa: A002
            last = input[-1] if isinstance(input, list) else {}
            if last.get("type") == "function_call_output":
                text = types.ResponseOutputText(text="ok", type="output_text", annotations=[])
                said = types.ResponseOutputMessage(
                    id="m1", role="assistant", status="completed", type="message", content=[text]
                )
            else:
                said = types.ResponseFunctionToolCall(
                    call_id="c1", name="add", arguments='{"x": 1}', type="function_call"
                )
            return agents.ModelResponse(output=[said], usage=agents.Usage(), response_id=None)

        def stream_response(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("the bench does not stream")

    @agents.function_tool  # type: ignore[untyped-decorator]
    async def add(x: int) -> str:
        """Add."""
        return str(x)

    agent = agents.Agent(name="a", instructions="You are a stub.", model=Stub(), tools=[add])
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "sessions.db"))
        await agents.Runner.run(agent, "hi", session=agents.SQLiteSession("warm", path))
        start = time.perf_counter()
        for number in range(TURNS // TURNS_EACH):
            session = agents.SQLiteSession(f"s{number}", path)
            for _ in range(TURNS_EACH):
                await agents.Runner.run(agent, "hi", session=session)
            session.close()
        return (time.perf_counter() - start) / TURNS


async def autogen() -> float:
    core = importlib.import_module("autogen_core")
    models = importlib.import_module("autogen_core.models")
    loop = importlib.import_module("autogen_core.tool_agent")

    class Stub(models.ChatCompletionClient):  # type: ignore[name-defined, misc]
        async def create(self, messages: Any, **_: Any) -> Any:
            done = len(messages) > 1
            said = "ok" if done else [core.FunctionCall(id="c1", name="add", arguments='{"x": 1}')]
            usage = models.RequestUsage(prompt_tokens=1, completion_tokens=1)
            reason = "stop" if done else "function_calls"
            return models.CreateResult(finish_reason=reason, content=said, usage=usage, cached=False)

        def create_stream(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("the bench does not stream")

        async def close(self) -> None: ...

        def actual_usage(self) -> Any:
            return models.RequestUsage(prompt_tokens=0, completion_tokens=0)

        total_usage = actual_usage

        def count_tokens(self, *_: Any, **__: Any) -> int:
            return 1

        remaining_tokens = count_tokens
        capabilities = model_info = property(lambda self: {})

    async def add(x: int) -> str:
        return str(x)

    tool = importlib.import_module("autogen_core.tools").FunctionTool(add, description="add")
    runtime, model = core.SingleThreadedAgentRuntime(), Stub()
    await loop.ToolAgent.register(runtime, "tools", lambda: loop.ToolAgent("tools", [tool]))
    runtime.start()
    where = core.AgentId("tools", "x")

    async def turn() -> None:
        hello = [models.UserMessage(content="hi", source="user")]
        await loop.tool_agent_caller_loop(runtime, where, model, hello, [tool])

    await turn()
    start = time.perf_counter()
    for _ in range(TURNS):
        await turn()
    took = (time.perf_counter() - start) / TURNS
    await runtime.stop()
    return took


MEASURES: dict[str, Callable[[], Coroutine[Any, Any, float]]] = {
    "full": coterie("full"),
    "relaxed": coterie("relaxed"),
    "crowd": crowd,
    "idle": idle,
    "openai-agents": openai_agents,
    "autogen": autogen,
}


def main(who: str = "") -> None:
    if not who:
        run()
        return
    logging.disable(logging.CRITICAL)
    figure = asyncio.run(MEASURES[who]())
    print(json.dumps({"bytes" if who == "idle" else "seconds": figure}))


if __name__ == "__main__":
    main(*sys.argv[1:])
