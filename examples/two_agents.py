"""Two agents and a person: Grace asks Ada, and the answer returns to the person through Grace."""

import asyncio
from collections.abc import Iterator

from stand_in import society

from coterie.testing import Calls, Says
from coterie.testing.model_server import Reply

AGENTS = """
[agents.grace]
prompt = "You run the office. Ask Ada whatever has to do with numbers."
[agents.ada]
prompt = "You know your way around numbers."
"""


async def main() -> None:
    async with society(AGENTS) as (here, model):
        ask_ada = Calls("send_message", {"to": "ada", "payload": {"text": "What is 6 times 7?"}})
        grace: Iterator[Reply] = iter([Says(calls=(ask_ada,)), "I asked Ada.", "Ada says it is 42."])
        model.default = lambda request: next(grace) if "(id: grace)" in str(request.body["messages"][0]) else "42"

        await here.send(to="grace", text="What is 6 times 7?")
        async for message in here.inbox("user"):
            print(f"{message.sender}: {message.payload['text']}")
            if "42" in message.payload["text"]:
                break


if __name__ == "__main__":
    asyncio.run(main())
