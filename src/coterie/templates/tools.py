# Tools of your own: every function with @tool is one. Its docstring and its parameters are what a model reads.
# Which agents may use it: tools = ["look_up"] in coterie.toml; by default all. Read again on POST /api/v1/reload.

# from coterie import ToolContext, tool
#
#
# @tool(effect="idempotent")  # "pure", "idempotent" or "unsafe" (the default, which is never run twice by itself)
# async def look_up(city: str, days: int = 1, *, ctx: ToolContext) -> dict:
#     """Weather for a city."""
#     return {"city": city, "days": days, "asked by": ctx.agent_id}
#
#
# @tool(approval=True)  # asks you first; process=True runs it in a process that can be killed
# def water_the_plants(litres: float) -> str:
#     """Open the tap."""
#     return f"{litres} l"
