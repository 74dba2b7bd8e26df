"""Until an agent has answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coterie.cli.conversation import Arrived, Conversation, Line, News, Over, Stands, Taken
from coterie.errors import NoAnswer, ServerStopping

LOOKED_AT = 50
"""Messages among which an answer is looked for when the agent is done."""
_GONE = {
    "withdrawn": "the message was withdrawn before {agent} read it: send it again",
    "dead": "{agent} can get no more mail, and the message is a dead letter: send it to somebody else",
}
_RESTS = {
    "paused": "{agent} is paused and reads it later: let it go on with coterie resume {agent}",
    "blocked": "{agent} is blocked and has not read it: see why with coterie agents, then coterie resume {agent}",
    "terminated": "{agent} is no more: send it to somebody else",
}


async def answers_to(
    conversation: Conversation, message_id: str, hear: Callable[[News], None] = lambda _: None
) -> Sequence[Line]:
    """What the agent said to the person until it answered that message, or had nothing more to say.

    `NoAnswer` when it said nothing, or cannot. `hear` is told everything that happens meanwhile.
    """
    try:
        return await _wait(conversation, message_id, hear)
    except ServerStopping:
        raise _stopped(conversation.agent_id) from None


def _stopped(agent_id: str) -> NoAnswer:
    return NoAnswer(f"the society stopped before {agent_id} answered: start it again")


async def _wait(conversation: Conversation, message_id: str, hear: Callable[[News], None]) -> Sequence[Line]:
    heard: dict[str, Line] = {}
    over = await _is_over(conversation, message_id)
    while not over:
        news = await conversation.news()
        hear(news)
        match news:
            case Arrived(line) if line.is_heard:
                heard[line.id] = line
                over = line.in_reply_to == message_id
            case Stands() | Taken():
                over = await _is_over(conversation, message_id)
            case Over():
                raise _stopped(conversation.agent_id)
            case _:
                pass
    if not any(line.in_reply_to == message_id for line in heard.values()):
        heard |= {line.id: line for line in await _said_since(conversation, message_id)}
    if not heard:
        agent = conversation.agent_id
        raise NoAnswer(f"{agent} has read it and said nothing: see what it did with coterie history {agent}")
    return list(heard.values())


async def _is_over(conversation: Conversation, message_id: str) -> bool:
    """Whether the agent has read the message and works no more, or waits for the person."""
    line, stands, agent = await conversation.line(message_id), await conversation.stands(), conversation.agent_id
    if line.state in _GONE:
        raise NoAnswer(_GONE[line.state].format(agent=agent))
    if line.state == "pending" and stands.state in _RESTS:
        raise NoAnswer(_RESTS[stands.state].format(agent=agent))
    return line.state == "taken" and (stands.state != "active" or stands.phase == "approval")


async def _said_since(conversation: Conversation, message_id: str) -> list[Line]:
    lines = list(await conversation.recent(LOOKED_AT))
    ids = [line.id for line in lines]
    since = lines[ids.index(message_id) + 1 :] if message_id in ids else lines
    return [line for line in since if line.is_heard]
