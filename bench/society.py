"""Runs in the new processes of other benchmarks; imports only what a society needs.

`open FOLDER` prints when a society is ready, `send FOLDER` sends until killed, `memory FOLDER` prints the bytes in use
after some work. All mail goes to the person, because agents would answer it.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import sys
from pathlib import Path

from coterie.messages import PERSON
from coterie.society import Society

SENDS_BEFORE_KILL = 500
AT_WORK_SECONDS = 2


async def open_society(folder: Path) -> None:
    async with Society.open(folder):
        print("ready", flush=True)


async def send_for_ever(folder: Path) -> None:
    async with Society.open(folder) as society:
        for number in itertools.count():
            await society.send(sender="agent-0", to=PERSON, text=str(number))
            if number == SENDS_BEFORE_KILL:
                print("sent", flush=True)


async def measure_memory(folder: Path) -> None:
    society = await Society.start(folder)
    for number in range(1_000):
        await society.send(sender="agent-0", to=PERSON, text=str(number), delay_ms=number % 100)
    await society.bus.delayed_count()
    await society.bus.delayed(limit=200)
    await society.waiting(PERSON)
    await asyncio.sleep(AT_WORK_SECONDS)
    gc.collect()
    print(resident_bytes(), flush=True)
    await society.abandon()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # each start reports that the last run was killed
    work = {"open": open_society, "send": send_for_ever, "memory": measure_memory}[sys.argv[1]]
    asyncio.run(work(Path(sys.argv[2])))
