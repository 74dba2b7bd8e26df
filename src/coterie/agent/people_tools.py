"""The built-in tools that make and end agents."""

from __future__ import annotations

from typing import Annotated, Any

from coterie.agent.registrar import Registrar
from coterie.agent.tool_context import ToolContext
from coterie.agent.tools import Tool, tool, tool_of


def people_tools(registrar: Registrar) -> tuple[Tool, ...]:
    @tool(effect="idempotent")
    async def create_role(
        name: Annotated[str, "a-z, 0-9, _ and -"],
        prompt: Annotated[str, "What an agent of this role is told about itself."],
        tools: Annotated[
            list[str] | None,
            "Names or patterns of the tools it may use; those you have when left out, none when empty.",
        ] = None,
        service: Annotated[str | None, "The id of a model service that you may use; your own when left out."] = None,
        *,
        ctx: ToolContext,
    ) -> dict[str, Any]:
        """Describe a kind of agent, to be made with spawn_agent. It has at most the tools that you have."""
        await registrar.create_role(name, prompt, tools, service, maker=ctx.agent_id)
        return {"role": name}

    @tool(effect="idempotent")
    async def spawn_agent(
        role: str,
        id: Annotated[str | None, "a-z, 0-9, _ and -; made up when left out."] = None,  # noqa: A002
        name: str | None = None,
        task: Annotated[str | None, "A first message to it, from you."] = None,
        *,
        ctx: ToolContext,
    ) -> dict[str, Any]:
        """Make an agent of a role. It is yours: you may terminate it when it is no longer needed."""
        made = await registrar.spawn(ctx.agent_id, role, id=id, name=name, key=ctx.idempotency_key)
        told: dict[str, Any] = {"id": made.id, "name": made.name}
        if task:
            told["messageId"] = (await ctx.send(made.id, {"text": task})).message_id
        return told

    @tool(effect="idempotent")
    async def terminate_agent(
        id: str,  # noqa: A002
        reason: Annotated[str | None, "For the record."] = None,
        *,
        ctx: ToolContext,
    ) -> dict[str, Any]:
        """End an agent that you made, and everybody it made."""
        return {"terminated": list(await registrar.terminate(id, by=ctx.agent_id)), "reason": reason}

    made = (create_role, spawn_agent, terminate_agent)
    return tuple(one for function in made if (one := tool_of(function)))
