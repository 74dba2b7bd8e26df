# Your own tools: every function with @tool. The model reads the docstring and the parameters.
# All agents may use a tool unless coterie.toml limits them: tools = ["look_up"]. Reload with POST /api/v1/reload.

# from coterie import ToolContext, tool
#
#
# @tool(effect="idempotent")  # "pure", "idempotent" or "unsafe" (the default; never repeated after a crash)
# async def look_up(city: str, days: int = 1, *, ctx: ToolContext) -> dict:
#     """Weather for a city."""
#     return {"city": city, "days": days, "asked by": ctx.agent_id}
#
#
# @tool(approval=True)  # asks you before each call; process=True runs it in a process that can be killed
# def water_the_plants(litres: float) -> str:
#     """Open the tap."""
#     return f"{litres} l"
