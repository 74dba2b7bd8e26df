"""A chat session: what the person types is sent or carried out, and what happens is shown."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from coterie.cli.conversation import (
    AgentStatus,
    ChatEvent,
    ChatMessage,
    Conversation,
    MessageArrived,
    MessagesRead,
    OutgoingMessage,
    SocietyStopped,
    open_conversation,
    wait_for_answers,
)
from coterie.cli.options import parse_duration_ms
from coterie.cli.output import local_time, print_error
from coterie.cli.terminal import MessageView, Screen, format_message, printable_lines, read_stdin
from coterie.errors import NoAnswer, Refused, ServerStopping, ServerUnusable
from coterie.messages import PERSON, Receipt
from coterie.text import one_line

RECENT_MESSAGES = 10
HELP = (
    "a number          answer with that quick reply; any other words are an answer of your own",
    "/attach FILE      send a file along with what you say next",
    "/delay 10s TEXT   say it later: 500ms, 10s, 5m, 2h, 1d",
    "/withdraw         take back what you said last, if it was not read yet",
    "/stop             end what the agent is doing; Ctrl-C does the same",
    "/quit             leave; so do Ctrl-D, and Ctrl-C while nothing runs",
)
Action = Callable[[], Awaitable[object]]


class Quit(Exception):
    """The person leaves, or the society stopped."""


async def run_chat(folder: Path, agent_id: str, token: str | None) -> bool:
    """Chat until the person leaves. False if a line of a pipe was not answered."""
    async with open_conversation(folder, agent_id, token) as conversation:
        if sys.stdin.isatty() and sys.stdout.isatty():
            await _chat_on_terminal(conversation)
            return True
        return await _chat_on_pipe(conversation)


async def _chat_on_terminal(conversation: Conversation) -> None:
    """Handle keys and events one after the other, in the order in which they come."""
    from coterie.cli.prompt import PromptScreen  # prompt_toolkit takes 0.1 s to import

    actions: asyncio.Queue[Action] = asyncio.Queue()
    screen = PromptScreen(
        sys.stdin,
        sys.stdout,
        on_line=lambda text: actions.put_nowait(partial(session.enter, text)),
        on_interrupt=lambda: actions.put_nowait(session.interrupt),
        on_close=lambda: actions.put_nowait(session.leave),
    )
    session = ChatSession(conversation, screen)
    actions.put_nowait(session.begin)

    async def queue_events() -> None:
        while True:
            actions.put_nowait(partial(session.handle, await conversation.next_event()))

    def queue_failure(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            actions.put_nowait(partial(_fail, error))

    listener = asyncio.create_task(queue_events(), name="coterie-chat-events")
    typing = asyncio.create_task(screen.run(), name="coterie-chat-prompt")
    for task in (listener, typing):
        task.add_done_callback(queue_failure)
    try:
        with suppress(Quit):
            while True:
                action = await actions.get()
                try:
                    await action()
                except ServerStopping:
                    await session.handle(SocietyStopped())
                except ServerUnusable as error:
                    if listener.done():  # it gave up: the server is gone
                        raise
                    session.report_failure(str(error))
    finally:
        listener.cancel()
        typing.cancel()
        await asyncio.gather(listener, typing, return_exceptions=True)
        await screen.flush()


async def _fail(error: BaseException) -> None:
    raise error


async def _chat_on_pipe(conversation: Conversation) -> bool:
    """Wait for the answer to each line before the next is sent. True if all were answered."""
    lines: asyncio.Queue[str | None] = asyncio.Queue()
    read_stdin(lines.put_nowait)
    session = ChatSession(conversation, Screen(sys.stdout))
    all_answered = True
    with suppress(Quit):
        while (line := await lines.get()) is not None:
            receipt = await session.enter(line)
            if receipt is None or receipt.scheduled_delivery_time:
                continue
            try:
                answers = await wait_for_answers(conversation, receipt.message_id, session.show_event)
                for answer in answers:
                    session.show_event(MessageArrived(answer))
                await session.mark_read(answers)
            except NoAnswer as error:
                print_error(f"Error: {error}")
                all_answered = False
    return all_answered


class ChatSession:
    def __init__(self, conversation: Conversation, screen: Screen) -> None:
        self.conversation = conversation
        self._screen = screen
        self._view = MessageView(screen, agent_id=conversation.agent_id)
        self._question: ChatMessage | None = None
        """The newest open question. A number answers it."""
        self._attachments: list[str] = []
        """References of files for the next message."""
        self._sent: list[str] = []
        self._queued: dict[str, str] = {}
        """Texts that the agent has not read yet, by message id."""
        self._status = AgentStatus(state="idle")
        self._is_stopping = False

    async def begin(self) -> None:
        """Show the end of the conversation and what the agent is doing."""
        messages = await self.conversation.recent(RECENT_MESSAGES)
        for message in messages:
            self._view.mark_shown(message.id)
            self._screen.print(*format_message(message, self._screen))
            self._note_question(message)
        self._print_note(f"You talk to {self.conversation.agent_id}. /help lists what you can type.")
        self._show_status(await self.conversation.status())
        await self.mark_read(messages)

    async def leave(self) -> None:
        raise Quit

    # Events

    async def handle(self, event: ChatEvent) -> None:
        self.show_event(event)
        if isinstance(event, MessageArrived):
            await self.mark_read([event.message])

    def show_event(self, event: ChatEvent) -> None:
        self._view.handle(event)
        match event:
            case MessageArrived(message):
                self._note_question(message)
            case MessagesRead(ids):
                for message_id in ids & self._queued.keys():
                    self._print_note(f"  {self.conversation.agent_id} has read: {self._queued.pop(message_id)}")
            case AgentStatus():
                self._show_status(event)
            case SocietyStopped():
                self._print_note("The society was stopped.")
                raise Quit

    async def mark_read(self, messages: Sequence[ChatMessage]) -> None:
        delivered = [message for message in messages if message.is_delivered]
        if delivered:
            await self.conversation.mark_read(delivered[-1])

    def _note_question(self, message: ChatMessage) -> None:
        if message.to == PERSON and message.quick_replies and not message.is_answered:
            self._question = message

    def _show_status(self, status: AgentStatus) -> None:
        self._status = status
        if status.state != "active":
            self._is_stopping = False
        self._screen.show_status("" if status.state == "idle" else f"{self.conversation.agent_id}: {status}")

    # What the person types

    async def enter(self, line: str) -> Receipt | None:
        """Carry out a line and return the receipt of the message that it sent, if any."""
        try:
            return await self._carry_out(line.strip())
        except Refused as refusal:
            self.report_failure(refusal.message)
        except OSError as error:
            self.report_failure(f"{error.filename} cannot be read ({error.strerror})")
        except ValueError as error:
            self.report_failure(str(error))
        return None

    async def interrupt(self) -> None:
        """Stop the agent; leave if it does nothing, or was asked to stop already."""
        if self._status.state != "active" or self._is_stopping:
            raise Quit
        await self._stop_turn()

    def report_failure(self, reason: str) -> None:
        self._print_note(f"  not done: {reason}")

    async def _carry_out(self, line: str) -> Receipt | None:
        command, _, rest = line.partition(" ")
        match command:
            case "":
                pass
            case "/quit" | "/exit":
                raise Quit
            case "/help":
                for text in HELP:
                    self._print_note(f"  {text}")
            case "/attach":
                await self._attach(rest.strip())
            case "/stop":
                await self._stop_turn()
            case "/withdraw":
                await self._withdraw()
            case "/delay":
                duration, _, text = rest.strip().partition(" ")
                if not text.strip():
                    raise ValueError("say when and what, as in: /delay 10s Tea is ready")
                return await self._send(text.strip(), delay_ms=parse_duration_ms(duration))
            case _ if command.startswith("/") and not rest and command[1:].isalpha():
                raise ValueError(f"there is no {command}: /help lists what you can type")
            case _:
                return await self._answer_or_send(line)
        return None

    async def _answer_or_send(self, text: str) -> Receipt:
        question = self._question
        if question is None:
            return await self._send(text)
        if text.isdecimal() and 1 <= int(text) <= len(question.quick_replies):
            option = int(text) - 1
            return await self._send(question.quick_replies[option], in_reply_to=question.id, option=option)
        return await self._send(text, in_reply_to=question.id)

    async def _send(
        self, text: str, *, delay_ms: float | None = None, in_reply_to: str | None = None, option: int | None = None
    ) -> Receipt:
        message = OutgoingMessage(
            text=text,
            delay_ms=delay_ms,
            attachments=tuple(self._attachments),
            in_reply_to=in_reply_to,
            option=option,
        )
        try:
            receipt = await self.conversation.send(message)
        except Refused as refusal:
            if refusal.code == "already_answered":
                self._question = None
            raise
        if in_reply_to:
            self._question = None
        self._attachments.clear()
        self._sent.append(receipt.message_id)
        self._view.mark_shown(receipt.message_id)
        self._show_sent(text, receipt)
        return receipt

    def _show_sent(self, text: str, receipt: Receipt) -> None:
        if self._screen.is_terminal:
            first, *more = printable_lines(text)
            self._screen.print(f"{self._screen.bold('You:')} {first}", *more)
        if receipt.scheduled_delivery_time:
            self._print_note(f"  due {local_time(receipt.scheduled_delivery_time)}")
        elif receipt.state == "queued":
            self._queued[receipt.message_id] = one_line(text, 60)
            self._print_note(f"  queued: {self.conversation.agent_id} is at work and reads it at its next step")

    async def _attach(self, name: str) -> None:
        file = _expand_home(name)
        self._attachments.append(await self.conversation.upload(file))
        self._print_note(f"  {file.name} goes along with what you say next")

    async def _withdraw(self) -> None:
        if not self._sent:
            raise ValueError("you have said nothing here yet")
        await self.conversation.withdraw(self._sent[-1])
        self._queued.pop(self._sent.pop(), None)
        self._print_note("  taken back")

    async def _stop_turn(self) -> None:
        self._is_stopping = self._status.state == "active"
        await self.conversation.stop_turn()
        self._print_note("  stopping; Ctrl-C again leaves" if self._is_stopping else "  nothing runs")

    def _print_note(self, text: str) -> None:
        self._screen.print(self._screen.dim(text))


def _expand_home(name: str) -> Path:
    return Path(name).expanduser()
