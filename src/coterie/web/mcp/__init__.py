"""The MCP server at /mcp: agents, tasks and artifacts of the society as tools and resources for other programs."""
