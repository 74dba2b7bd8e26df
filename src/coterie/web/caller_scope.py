"""What a caller sees of the society: the owner everything, a program its agents and the tasks that it started."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coterie.agents import Agent
from coterie.artifacts import Artifact
from coterie.errors import Refused
from coterie.messages import PERSON, Message
from coterie.society import Society
from coterie.store import Page
from coterie.tasks import Task, TaskState, TaskTree
from coterie.text import one_line
from coterie.web.auth import Caller

AGENT_PAGE = 200
MAX_PARENTS = 16
"""Tasks that scheduled one another, from a task back to the request of a program."""
SEARCHED_TASKS = 1_000
"""Newest tasks that are searched for those of a program."""
SEARCHED_ARTIFACTS = 1_000
"""Newest artifacts of each agent that a program can list."""


class CallerScope:
    """Reads for one caller. What the caller may not see is reported as unknown."""

    def __init__(self, society: Society, caller: Caller) -> None:
        self.society, self.caller = society, caller
        self._store = society.store

    # Agents

    async def agents(self) -> Sequence[Agent]:
        """Agents that get mail, by id."""
        found: list[Agent] = []
        after = ""
        while page := await self._store.agents(after, AGENT_PAGE):
            found += page
            after = page[-1].id
        return [
            agent
            for agent in found
            if agent.kind == "agent" and agent.state != "terminated" and self.caller.may_reach(agent.id)
        ]

    async def offered_agents(self) -> Sequence[Agent]:
        """Those that answer: without retired ones, which only keep their mail."""
        return [agent for agent in await self.agents() if self.society.agents.find(agent.id)]

    async def agent(self, agent_id: str) -> Agent:
        agent = await self._store.agent(agent_id) if self.caller.may_reach(agent_id) else None
        if agent is None or agent.kind == "person":
            raise Refused("unknown_agent", f'there is no agent "{one_line(agent_id)}" for you: list the agents')
        return agent

    # Tasks and messages

    async def may_see(self, task_id: str) -> bool:
        """True if the caller started the task, or the task that scheduled it."""
        if self.caller.is_owner:
            return True
        for _ in range(MAX_PARENTS):
            first = await self._store.message(task_id)
            if first is None:
                return False
            if self.caller.may_see(first):
                return True
            if first.parent_task is None:
                return False
            task_id = first.parent_task
        return False

    async def task(self, message_id: str) -> TaskTree:
        """The task of any of its messages."""
        tree = await self._store.task_tree(message_id)
        if tree is None or not await self.may_see(tree.task.id):
            raise Refused("unknown_task", f'there is no task "{one_line(message_id)}" for you')
        return tree

    async def tasks(self, *, state: TaskState | None, agent: str | None, limit: int) -> Sequence[Task]:
        """Newest first."""
        found: list[Task] = []
        before, searched = None, 0
        while len(found) < limit and searched < SEARCHED_TASKS:
            page = await self._store.tasks(Page(before=before, limit=AGENT_PAGE), state=state, agent=agent)
            found += [task for task in page if await self.may_see(task.id)]
            if len(page) < AGENT_PAGE:
                break
            before, searched = page[-1].seq, searched + len(page)
        return found[:limit]

    async def request(self, message_id: str) -> Message:
        """A message of the person in a visible task."""
        message = await self._store.message(message_id)
        if message is None or message.sender != PERSON or not await self.may_see(message.task or message.id):
            raise Refused("unknown_message", f'there is no message "{one_line(message_id)}" for you')
        return message

    async def question(self, message_id: str) -> Message:
        """A message to the person in a visible task, which the person may answer."""
        message = await self._store.message(message_id)
        if message is None or message.to != PERSON or not await self.may_see(message.task or message.id):
            raise Refused("inReplyTo_unknown", f'there is no question "{one_line(message_id)}" for you')
        return message

    async def visible(self, found: Iterable[Message]) -> Sequence[Message]:
        """Those messages whose tasks the caller may see."""
        known: dict[str, bool] = {}
        kept = []
        for message in found:
            task = message.task or message.id
            if task not in known:
                known[task] = await self.may_see(task)
            if known[task]:
                kept.append(message)
        return kept

    # Artifacts

    async def artifact(self, ref: str) -> Artifact:
        """A program may read what one of its agents may read."""
        for reader in await self._readers():
            found = await self._store.artifacts([ref], reader=reader)
            if ref in found:
                return found[ref]
        raise Refused("unknown_artifact", f'there is no artifact "{one_line(ref)}" for you')

    async def artifacts(self, after: str | None, limit: int) -> Sequence[Artifact]:
        """Newest first, starting after the artifact `after`. `Refused("unknown_artifact")` if there is none."""
        if self.caller.is_owner:
            return await self._store.artifacts_before(after, limit)
        found = {
            artifact.ref: artifact
            for reader in await self._readers()
            for artifact in await self._store.latest_artifacts(SEARCHED_ARTIFACTS, reader=reader)
        }
        newest = sorted(found.values(), key=lambda one: (one.created_at, one.ref), reverse=True)
        if after is not None:
            if after not in found:
                raise Refused("unknown_artifact", f'there is no artifact "{one_line(after)}" for you')
            newest = newest[newest.index(found[after]) + 1 :]
        return newest[:limit]

    async def _readers(self) -> Sequence[str | None]:
        if self.caller.is_owner:
            return [None]
        return [agent.id for agent in await self.agents()]
