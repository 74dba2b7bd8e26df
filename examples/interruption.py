"""An interruption: the person writes while the agent works, and the plan that was not started is withdrawn."""

import asyncio

from stand_in import society

from coterie.testing import Calls, Says


async def main() -> None:
    async with society("[agents.ada]\n") as (here, model):
        thinking = asyncio.Event()
        send_all = Calls("send_message", {"to": "user", "payload": {"text": "(the wrong mail)"}})
        model.script(
            Says("I will write to everybody.", calls=(send_all,), gate=thinking), "All right, I wrote to nobody."
        )

        await here.send(to="ada", text="Write to everybody.")
        await model.wait_for_request(1)  # the model is working …
        receipt = await here.send(to="ada", text="Stop, not yet!")
        print(f"the second message is {receipt.state}")
        thinking.set()  # … and only now returns its plan

        async for message in here.inbox("user"):
            print(f"{message.sender}: {message.payload['text']}")
            break
        roles = [row.role for row in await here.store.history("ada")]
        print(f"the history has no trace of the plan: {roles}")


if __name__ == "__main__":
    asyncio.run(main())
