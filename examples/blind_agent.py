"""A picture for an agent without vision: it gets a description and the ids of agents with vision, and forwards it."""

import asyncio
import json
import re

from stand_in import PICTURE, society

from coterie.testing import Calls, Says
from coterie.testing.model_server import ReceivedRequest

AGENTS = '[agents.reader]\nservice = "blind"\n[agents.seer]\nservice = "seeing"\n'


def answer(request: ReceivedRequest) -> Says | str:
    """Answers of two simple models: one with vision, one that forwards the picture."""
    messages = request.body["messages"]
    if request.body["model"] == "seeing":
        return "I see one red pixel." if "image_url" in json.dumps(messages) else "I see nothing."
    described = re.search(r'\{"attachment".*\}', json.dumps(messages[-1]["content"]).replace('\\"', '"'))
    if described and messages[-1]["role"] == "user" and messages[-2]["role"] == "system":
        attachment = json.loads(described[0])["attachment"]
        needs, readers = attachment["unsupported"], attachment["capableAgents"]
        print(f"reader gets: {attachment['filename']} needs {needs}, ask {readers}")
        payload = {"text": "What is this?", "attachments": [{"artifactRef": attachment["artifactRef"]}]}
        return Says(calls=(Calls("send_message", {"to": attachment["capableAgents"][0], "payload": payload}),))
    return "The seer sees one red pixel." if "one red pixel" in json.dumps(messages) else "I passed it on."


async def main() -> None:
    async with society(AGENTS, blind=["text"], seeing=["text", "vision"]) as (here, model):
        model.default = answer
        picture = await here.artifacts.put(PICTURE, "dot.png")
        await here.send(to="reader", text="What is on this picture?", attachments=[picture.ref])
        async for message in here.inbox("user"):
            print(f"{message.sender}: {message.payload['text']}")
            if "red pixel" in message.payload["text"]:
                break


if __name__ == "__main__":
    asyncio.run(main())
