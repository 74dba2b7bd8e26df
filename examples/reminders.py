"""Reminders: a delayed message is stored durably and delivered when it is due."""

import asyncio

from stand_in import society

from coterie.testing import Calls, Says


async def main() -> None:
    async with society("[agents.ada]\n") as (here, model):
        remind = Calls("send_message", {"to": "user", "payload": {"text": "Time for tea!"}, "delayMs": 300})
        model.script(Says(calls=(remind,)), "I will remind you.")

        await here.send(to="ada", text="Remind me of the tea.")
        received = 0
        async for message in here.inbox("user"):
            print(f"{message.sender}: {message.payload['text']}")
            if message.deliver_at:
                print(f"  due {message.deliver_at:%H:%M:%S}, delivered {message.delivered_at:%H:%M:%S}")
            received += 1
            if received == 1:
                print(f"still delayed for you: {await here.bus.delayed_count('user')}")
            if received == 2:
                break


if __name__ == "__main__":
    asyncio.run(main())
