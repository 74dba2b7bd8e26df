"""Messages as a terminal shows them."""

from __future__ import annotations

import json
from typing import Any

from coterie.cli.conversation import Line
from coterie.cli.screen import Screen, plain
from coterie.messages import PERSON


def shown(line: Line, screen: Screen, *, named: bool = True) -> list[str]:
    """`named`: with who says it in front."""
    first, *more = plain(line.text)
    who = "You" if line.sender == PERSON else line.sender
    lines = [f"{screen.bold(f'{who}:')} {first}" if named else first, *more]
    return [*lines, *below(line, screen)]


def below(line: Line, screen: Screen) -> list[str]:
    """What belongs to a message besides its text: arguments to approve, files, an early end, numbered quick replies."""
    lines = [f"  {one}" for one in _arguments(line.wire["payload"].get("approval"))]
    lines += [screen.dim(f"  [file {name}]") for name in line.files]
    if line.stopped:
        lines.append(screen.dim("  (stopped here)"))
    if line.options and line.to == PERSON:
        mark = " (answered)" if line.answered else ""
        lines += [f"  {screen.bold(f'{number})')} {plain(option)[0]}" for number, option in enumerate(line.options, 1)]
        lines[-1] += screen.dim(mark)
    return lines


def _arguments(approval: Any) -> list[str]:
    """All arguments of the call that a question asks about: nobody should approve what is not shown."""
    arguments = approval.get("arguments") if isinstance(approval, dict) else None
    if not isinstance(arguments, dict):
        return []
    lines = []
    for name, value in arguments.items():
        lines += plain(f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
    return lines
