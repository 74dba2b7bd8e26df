"""A backup taken during writes is one consistent snapshot."""

from __future__ import annotations

import asyncio
from pathlib import Path

from coterie.society import Society
from coterie.testing import FakeClock

from .scenarios import AGENTS, make_home
from .verifier import find_violations, open_database


async def test_a_backup_during_writes_is_consistent_and_has_all_messages_acknowledged_before_it(
    tmp_path: Path, clock: FakeClock
) -> None:
    make_home(tmp_path / "society")
    async with Society.open(tmp_path / "society", clock=clock, work=False) as society:
        acknowledged: list[str] = []
        enough = asyncio.Event()

        async def write(agent: str) -> None:
            number = 0
            while not enough.is_set():
                number += 1
                delay = 1_000 if number % 3 == 0 else None
                receipt = await society.send(to=agent, text=f"{agent} {number}", delay_ms=delay)
                acknowledged.append(receipt.message_id)
                if number % 50 == 0:
                    await clock.advance(seconds=1)

        writers = [asyncio.create_task(write(agent)) for agent in AGENTS]
        copies = []
        for number in range(5):
            before = len(acknowledged)
            copy = tmp_path / f"copy{number}" / "data" / "coterie.db"
            copy.parent.mkdir(parents=True)
            await society.store.backup(copy)
            copies.append((copy.parent.parent, set(acknowledged[:before])))
        written_meanwhile = len(acknowledged) - len(copies[0][1])
        enough.set()
        await asyncio.gather(*writers)

    assert written_meanwhile > 20, "nothing was written during the backups"
    for folder, promised in copies:
        with open_database(folder) as db:
            assert find_violations(db) == []
            assert promised <= {row[0] for row in db.execute("SELECT id FROM messages")}
    async with Society.open(copies[-1][0], clock=clock, work=False) as restored:
        assert [violation async for violation in restored.store.violations()] == []
        await restored.send(to="user", text="goes on")
