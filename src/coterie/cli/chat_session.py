"""The person's side of a chat: what is typed goes out, what happens is shown."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from coterie.cli import durations
from coterie.cli.conversation import Arrived, Conversation, Line, News, Over, Speech, Stands, Taken
from coterie.cli.editor import Closed, Entered
from coterie.cli.files import check_file, home_of
from coterie.cli.keyboard import piped, typing
from coterie.cli.lines import shown
from coterie.cli.output import moment, say_aside
from coterie.cli.reply import Reply
from coterie.cli.screen import Screen, plain
from coterie.cli.waiting import answers_to
from coterie.errors import NoAnswer, Refused, ServerStopping, ServerUnusable
from coterie.messages import PERSON, Receipt
from coterie.text import one_line

RECENT = 10
HELP = (
    "a number          answer with that quick reply; any other words are an answer of your own",
    "/attach FILE      send a file along with what you say next",
    "/delay 10s TEXT   say it later: 500ms, 10s, 5m, 2h, 1d",
    "/withdraw         take back what you said last, if it was not read yet",
    "/stop             end what the agent is doing; Ctrl-C does the same",
    "/quit             leave; so do Ctrl-D, and Ctrl-C while nothing runs",
)


@dataclass(frozen=True, slots=True)
class Opened:
    """The conversation can begin."""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Ctrl-C."""


Happening = Opened | News | Entered | Closed | Interrupt | Exception


class Quit(Exception):
    """The person leaves."""


class Session:
    def __init__(self, conversation: Conversation, screen: Screen) -> None:
        self._conversation, self._screen = conversation, screen
        self._reply = Reply(screen, speaker=conversation.agent_id)
        self._question: Line | None = None
        """The newest open one: a number answers it."""
        self._attached: list[str] = []
        self._sent: list[str] = []
        self._queued: dict[str, str] = {}
        self._stands = Stands(state="idle")
        self._stopping = False

    @property
    def conversation(self) -> Conversation:
        return self._conversation

    @property
    def screen(self) -> Screen:
        return self._screen

    async def begin(self) -> None:
        lines = await self._conversation.recent(RECENT)
        for line in lines:
            self._reply.leave_out(line.id)
            self._screen.say(*shown(line, self._screen))
            self._note_question(line)
        self._aside(f"You talk to {self._conversation.agent_id}. /help lists what you can type.")
        self._show_state(await self._conversation.stands())
        await self._mark_read(lines)

    # What happens

    async def show(self, lines: Sequence[Line]) -> None:
        """As if they had just come in."""
        for line in lines:
            self.hear(Arrived(line))
        await self._mark_read(lines)

    async def take(self, news: News) -> None:
        self.hear(news)
        if isinstance(news, Arrived):
            await self._mark_read([news.line])

    def hear(self, news: News) -> None:
        self._reply.hear(news)
        match news:
            case Arrived(line):
                self._note_question(line)
            case Taken(ids):
                for message_id in ids & self._queued.keys():
                    self._aside(f"  {self._conversation.agent_id} has read: {self._queued.pop(message_id)}")
            case Stands():
                self._show_state(news)
            case Over():
                self._aside("The society was stopped.")
                raise Quit
            case _:
                pass

    def _note_question(self, line: Line) -> None:
        if line.to == PERSON and line.options and not line.answered:
            self._question = line

    def _show_state(self, stands: Stands) -> None:
        self._stands = stands
        if stands.state != "active":
            self._stopping = False
        self._screen.tell("" if stands.state == "idle" else f"{self._conversation.agent_id}: {stands.words}")

    async def _mark_read(self, lines: Sequence[Line]) -> None:
        heard = [line for line in lines if line.is_heard]
        if heard:
            await self._conversation.read(heard[-1])

    # What the person does

    async def enter(self, text: str) -> Receipt | None:
        """What was sent, if anything was."""
        try:
            return await self._enter(text.strip())
        except Refused as refusal:
            self.regret(refusal.message)
        except OSError as error:
            self.regret(f"{error.filename} cannot be read ({error.strerror})")
        except ValueError as error:
            self.regret(str(error))
        return None

    def regret(self, why: str) -> None:
        self._aside(f"  not done: {why}")

    async def _enter(self, text: str) -> Receipt | None:
        command, _, rest = text.partition(" ")
        match command:
            case "":
                return None
            case "/quit" | "/exit":
                raise Quit
            case "/help":
                for line in HELP:
                    self._aside(f"  {line}")
            case "/attach":
                await self._attach(rest.strip())
            case "/stop":
                await self._stop_turn()
            case "/withdraw":
                await self._withdraw()
            case "/delay":
                duration, _, words = rest.strip().partition(" ")
                if not words.strip():
                    raise ValueError("say when and what, as in: /delay 10s Tea is ready")
                return await self._say(Speech(text=words.strip(), delay_ms=durations.to_ms(duration)))
            case _ if command.startswith("/") and not rest and command[1:].isalpha():
                raise ValueError(f"there is no {command}: /help lists what you can type")
            case _:
                return await self._say(self._speech(text))
        return None

    def _speech(self, text: str) -> Speech:
        question = self._question
        if question and text.isdecimal() and 1 <= int(text) <= len(question.options):
            option = int(text) - 1
            return Speech(text=question.options[option], answers=question.id, option=option)
        return Speech(text=text, answers=question.id if question else None)

    async def _say(self, speech: Speech) -> Receipt:
        whole = Speech(
            text=speech.text,
            delay_ms=speech.delay_ms,
            attachments=tuple(self._attached),
            answers=speech.answers,
            option=speech.option,
        )
        try:
            receipt = await self._conversation.say(whole)
        except Refused as refusal:
            if refusal.code == "already_answered":
                self._question = None
            raise
        if speech.answers:
            self._question = None
        self._attached.clear()
        self._sent.append(receipt.message_id)
        self._reply.leave_out(receipt.message_id)
        self._show_own(speech.text, receipt)
        return receipt

    def _show_own(self, text: str, receipt: Receipt) -> None:
        if self._screen.moves:
            first, *more = plain(text)
            self._screen.say(f"{self._screen.bold('You:')} {first}", *more)
        if receipt.scheduled_delivery_time:
            self._aside(f"  due {moment(receipt.scheduled_delivery_time)}")
        elif receipt.state == "queued":
            self._queued[receipt.message_id] = one_line(text, 60)
            self._aside(f"  queued: {self._conversation.agent_id} is at work and reads it at its next step")

    async def _attach(self, name: str) -> None:
        file = home_of(name)
        check_file(file)
        self._attached.append(await self._conversation.attach(file))
        self._aside(f"  {file.name} goes along with what you say next")

    async def _withdraw(self) -> None:
        if not self._sent:
            raise ValueError("you have said nothing here yet")
        await self._conversation.withdraw(self._sent[-1])
        self._queued.pop(self._sent.pop(), None)
        self._aside("  taken back")

    async def interrupt(self) -> None:
        """Stops the agent; when there is nothing to stop, or it was asked to already, leaves."""
        if self._stands.state != "active" or self._stopping:
            raise Quit
        await self._stop_turn()

    async def _stop_turn(self) -> None:
        self._stopping = self._stands.state == "active"
        await self._conversation.stop_turn()
        self._aside("  stopping; Ctrl-C again leaves" if self._stopping else "  nothing runs")

    def _aside(self, text: str) -> None:
        self._screen.say(self._screen.dim(text))


async def take_part(session: Session) -> bool:
    """On a terminal, until the person leaves: typing and listening go on side by side."""
    happenings: asyncio.Queue[Happening] = asyncio.Queue()
    happenings.put_nowait(Opened())
    listener = asyncio.create_task(_listen(session.conversation, happenings), name="coterie-news")
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, happenings.put_nowait, Interrupt())
    try:
        with suppress(Quit), typing(session.screen, happenings.put_nowait):
            while True:
                await _happen(session, await happenings.get())
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)
    return True


async def _listen(conversation: Conversation, happenings: asyncio.Queue[Happening]) -> None:
    try:
        while True:
            happenings.put_nowait(await conversation.news())
    except Exception as error:
        happenings.put_nowait(error)


async def _happen(session: Session, happening: Happening) -> None:
    try:
        await _act(session, happening)
    except ServerStopping:
        session.hear(Over())
    except ServerUnusable as error:
        if error is happening:
            raise
        # Whether it is gone for good, the listener finds out.
        session.regret(str(error))


async def _act(session: Session, happening: Happening) -> None:
    match happening:
        case Opened():
            await session.begin()
        case Entered(text):
            await session.enter(text)
        case Closed():
            raise Quit
        case Interrupt():
            await session.interrupt()
        case Exception():
            raise happening
        case _:
            await session.take(happening)


async def take_lines(session: Session) -> bool:
    """From a pipe: each line is answered before the next is said. Whether all were."""
    lines: asyncio.Queue[Entered | Closed] = asyncio.Queue()
    piped(lines.put_nowait)
    answered = True
    with suppress(Quit):
        while isinstance(line := await lines.get(), Entered):
            receipt = await session.enter(line.text)
            if receipt is None or receipt.scheduled_delivery_time:
                continue
            try:
                answers = await answers_to(session.conversation, receipt.message_id, session.hear)
                await session.show(answers)
            except NoAnswer as silence:
                say_aside(f"Error: {silence}")
                answered = False
    return answered
