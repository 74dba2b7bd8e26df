"""A chat session on a terminal or a pipe: shows messages, and sends or carries out what the person types."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from coterie.cli.conversation import (
    AgentStatus,
    ChatEvent,
    ChatMessage,
    Conversation,
    DraftEnded,
    DraftText,
    MessageArrived,
    MessagesRead,
    OutgoingMessage,
    RetryPlanned,
    SocietyStopped,
    TaskChanged,
    ToolProgress,
    open_conversation,
    wait_for_answers,
)
from coterie.cli.options import parse_duration_ms
from coterie.cli.output import escape_controls, local_time, print_error
from coterie.cli.tasks import format_work
from coterie.clock import Clock, SystemClock
from coterie.errors import NoAnswer, Refused, ServerStopping, ServerUnusable
from coterie.messages import PERSON, Receipt
from coterie.text import one_line

RECENT_MESSAGES = 10
MAX_REASON = 400
"""Characters of an error that are shown."""
PROGRESS_SECONDS = 2.0
"""Between two lines about the progress of a tool call, where no status is shown."""
HELP = (
    "a number          answer with that quick reply; any other text is an answer of your own",
    "/attach FILE      send a file with your next message",
    "/delay 10s TEXT   send it later: 500ms, 10s, 5m, 2h, 1d",
    "/withdraw         withdraw your last message, if it was not read yet",
    "/stop             end what the agent is doing; Ctrl-C does the same",
    "/quit             leave; so do Ctrl-D, and Ctrl-C while nothing runs",
)
CUT_OFF = {
    "length": "cut off at the length limit; send Continue to get the rest",
    "content_filter": "cut off by the content filter of the model service",
}
Action = Callable[[], Awaitable[object]]
_BOLD, _DIM, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"


class Quit(Exception):
    """The person leaves, or the society stopped."""


async def run_chat(folder: Path, agent_id: str, token: str | None) -> bool:
    """Chat until the person leaves. False if a line of a pipe was not carried out or not answered."""
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
    """Wait for the answer to each line before the next is sent. True if all were carried out and answered."""
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
    return all_answered and not session.has_failed


def read_stdin(on_line: Callable[[str | None], None]) -> None:
    """Pass each line of standard input to `on_line`, then None. A thread reads, because some files cannot be polled."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        with suppress(RuntimeError):  # the loop is closed
            for line in sys.stdin:
                loop.call_soon_threadsafe(on_line, line.rstrip("\n"))
            loop.call_soon_threadsafe(on_line, None)

    threading.Thread(target=read, name="coterie-stdin", daemon=True).start()


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
        self._progress = ToolProgress()
        self._is_stopping = False
        self.has_failed = False
        """A line could not be carried out."""

    async def begin(self) -> None:
        """Show the end of the conversation and what the agent is doing."""
        messages = await self.conversation.recent(RECENT_MESSAGES)
        for message in messages:
            self._view.mark_shown(message.id)
            self._screen.print(*format_message(message, self._screen))
            self._note_question(message)
        self._print_note(f"You talk to {self.conversation.agent_id}. /help lists the commands.")
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
            case ToolProgress():
                self._progress = event
                self._show_status(self._status)
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
        text = f"{self.conversation.agent_id}: {status}"
        # The first progress of a call may arrive before the status that names its tool.
        if self._progress.text and status.phase == "tool" and status.tool == self._progress.tool:
            text = f"{text}, {self._progress.text}"
        self._screen.show_status("" if status.state == "idle" else text)

    # What the person types

    async def enter(self, line: str) -> Receipt | None:
        """Carry out a line and return the receipt of the message that it sent, if any."""
        try:
            return await self._carry_out(line.strip())
        except Refused as refused:
            self.report_failure(refused.message)
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
        self.has_failed = True
        if self._screen.is_terminal:
            self._print_note(f"  not done: {reason}")
        else:  # standard output is for answers
            print_error(f"Error: {reason}")

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
                    raise ValueError("expected a delay and a text, as in: /delay 10s Tea is ready")
                return await self._send(text.strip(), delay_ms=parse_duration_ms(duration))
            case _ if command.startswith("/") and not rest and command[1:].isalpha():
                raise ValueError(f"there is no command {command}: /help lists the commands")
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
        except Refused as refused:
            if refused.code == "already_answered":
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
        if not name:
            raise ValueError("expected a file, as in: /attach notes.txt")
        file = _expand_home(name)
        self._attachments.append(await self.conversation.upload(file))
        self._print_note(f"  {file.name} is sent with your next message")

    async def _withdraw(self) -> None:
        if not self._sent:
            raise ValueError("there is no message of yours to withdraw")
        await self.conversation.withdraw(self._sent[-1])
        self._queued.pop(self._sent.pop(), None)
        self._print_note("  withdrawn")

    async def _stop_turn(self) -> None:
        self._is_stopping = self._status.state == "active"
        await self.conversation.stop_turn()
        self._print_note("  stopping; Ctrl-C again leaves" if self._is_stopping else "  the agent is not at work")

    def _print_note(self, text: str) -> None:
        self._screen.print(self._screen.dim(text))


def _expand_home(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # there is no such user
        return Path(name)


# How messages are shown


def printable_lines(text: str) -> list[str]:
    """The lines of a text, unable to control the terminal."""
    return [escape_controls(line.expandtabs(4)) for line in text.split("\n")]


class Screen:
    """Writes finished lines to `out`; on a terminal also the text of a reply as it grows."""

    shows_status = False

    def __init__(self, out: TextIO) -> None:
        self.is_terminal = out.isatty()
        self._out = out
        self._has_open_line = False

    def bold(self, text: str) -> str:
        return f"{_BOLD}{escape_controls(text)}{_RESET}" if self.is_terminal else escape_controls(text)

    def dim(self, text: str) -> str:
        return f"{_DIM}{escape_controls(text)}{_RESET}" if self.is_terminal else escape_controls(text)

    def print(self, *lines: str) -> None:
        """Write lines. They may be bold or dim; text from elsewhere must be escaped already."""
        self.end_draft()
        self._write("".join(f"{line}\n" for line in lines))

    def append_draft(self, text: str) -> None:
        """Write more of a growing reply."""
        self._write("\n".join(printable_lines(text)))
        self._has_open_line = not text.endswith("\n")

    def end_draft(self) -> None:
        if self._has_open_line:
            self._write("\n")
            self._has_open_line = False

    def show_status(self, text: str) -> None:
        """Show what the agent is doing; empty: nothing. Only a prompt has room for it."""

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class MessageView:
    """Shows each message once, whether its draft was shown before or not."""

    def __init__(self, screen: Screen, *, agent_id: str | None = None, clock: Clock | None = None) -> None:
        """`agent_id`: the agent that writes drafts. None: messages are shown without their sender."""
        self._screen, self._agent_id, self._clock = screen, agent_id, clock or SystemClock()
        self._progress, self._progress_at = "", -math.inf
        self._draft_id: str | None = None
        self._draft_text = ""
        self._shown: set[str] = set()
        self._workers: tuple[str, ...] = ()
        self._retry_reason: str | None = None
        """Why the model is asked again, as it was shown. None: it is not."""
        self.followed_task: str | None = None
        """The task whose workers are shown."""

    def handle(self, event: ChatEvent) -> None:
        match event:
            case DraftText() if self._screen.is_terminal:
                self._append(event)
            case DraftEnded(draft_id, outcome) if draft_id == self._draft_id and outcome != "stored":
                self._end_draft()
                # Lines that the person typed meanwhile may stand between the draft and this note.
                notes = {"withdrawn": "the answer above was withdrawn", "failed": "broken off"}
                self._screen.print(self._screen.dim(f"  ({notes.get(outcome, outcome)})"))
            case AgentStatus() | RetryPlanned() | ToolProgress():
                self.handle_status(event)
            case TaskChanged(task) if self._draft_id is None:
                self.show_work(task)
            case MessageArrived(message) if message.state != "delayed":
                self.show([message])

    def handle_status(self, event: ChatEvent) -> None:
        """Show why there is no answer yet and who is at work, and nothing else."""
        match event:
            case AgentStatus(phase="retry", reason=str(reason)) | RetryPlanned(reason) if reason:
                if reason != self._retry_reason:
                    self._note(f"  (no answer yet, the model is asked again: {one_line(reason, MAX_REASON)})")
                self._retry_reason = reason
            case AgentStatus():
                self._retry_reason = None
            case ToolProgress(tool=tool, text=text) if text:
                self._show_progress(f"  ({tool}: {text})")
            case TaskChanged(task):
                self.show_work(task)

    def show_work(self, task: Mapping[str, Any]) -> None:
        """Say who is at work on the followed task, on standard error if that is a terminal."""
        workers = tuple(task["activeAgents"])
        if task["id"] == self.followed_task and workers and workers != self._workers and sys.stderr.isatty():
            self._workers = workers
            self._screen.end_draft()
            print_error(f"  ({format_work(task)})")

    def _show_progress(self, text: str) -> None:
        """Write a line now and then, unless the screen shows a status."""
        now = self._clock.monotonic()
        if self._screen.shows_status or text == self._progress or now - self._progress_at < PROGRESS_SECONDS:
            return
        self._progress, self._progress_at = text, now
        self._note(text)

    def _note(self, text: str) -> None:
        """Write a line about the work of the agent. On a pipe to standard error: standard output is for answers."""
        if self._screen.is_terminal:
            self._screen.print(self._screen.dim(text))
        else:
            print_error(text.strip())

    def mark_shown(self, message_id: str) -> None:
        self._shown.add(message_id)

    def show(self, messages: Sequence[ChatMessage]) -> None:
        for message in messages:
            if message.id not in self._shown:
                self._shown.add(message.id)
                self._show(message)

    def _show(self, message: ChatMessage) -> None:
        seen = self._draft_text.strip()
        if self._draft_id is None or message.is_problem or not message.text.startswith(seen):
            self._screen.print(*format_message(message, self._screen, with_sender=self._agent_id is not None))
            return
        if rest := message.text[len(seen) :].rstrip():
            self._screen.append_draft(rest)
        self._end_draft()
        self._screen.print(*format_details(message, self._screen))

    def _append(self, draft: DraftText) -> None:
        if draft.draft_id != self._draft_id:
            self._end_draft()
            self._draft_id = draft.draft_id
            if self._agent_id is not None:
                self._screen.append_draft(f"{self._agent_id}: ")
        new = draft.text[max(0, len(self._draft_text) - draft.start) :]
        self._draft_text += new
        self._screen.append_draft(new)

    def _end_draft(self) -> None:
        self._draft_id, self._draft_text = None, ""
        self._screen.end_draft()


def format_message(message: ChatMessage, screen: Screen, *, with_sender: bool = True) -> list[str]:
    first, *more = printable_lines(message.text)
    sender = "You" if message.sender == PERSON else message.sender
    lines = [f"{screen.bold(f'{sender}:')} {first}" if with_sender else first, *more]
    return [*lines, *format_details(message, screen)]


def format_details(message: ChatMessage, screen: Screen) -> list[str]:
    """What belongs to a message besides its text: arguments to approve, files, an early end, quick replies."""
    lines = [f"  {line}" for line in _format_arguments(message.json["payload"].get("approval"))]
    lines += [screen.dim(f"  [file {name}]") for name in message.filenames]
    if message.is_stopped:
        lines.append(screen.dim("  (stopped here)"))
    if message.cut_off:
        lines.append(screen.dim(f"  ({CUT_OFF.get(message.cut_off, 'cut off')})"))
    if message.quick_replies and message.to == PERSON:
        for number, option in enumerate(message.quick_replies, 1):
            lines.append(f"  {screen.bold(f'{number})')} {printable_lines(option)[0]}")
        lines[-1] += screen.dim(" (answered)" if message.is_answered else "")
    return lines


def _format_arguments(approval: Any) -> list[str]:
    """All arguments of the tool call to approve: the person must see what they approve."""
    arguments = approval.get("arguments") if isinstance(approval, dict) else None
    if not isinstance(arguments, dict):
        return []
    lines = []
    for name, value in arguments.items():
        lines += printable_lines(
            f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        )
    return lines
