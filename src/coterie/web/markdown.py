"""Markdown as a tree of nodes, which the panel builds with `createElement`: data, never HTML.

A node is a string (plain text) or one of the structs below; `c` holds its children. Links go to http, https and mailto
only. Other links and HTML stay plain text. A text that is too long or nested too deep is one plain string.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Struct, UnsetType
from pygments.lexers import get_lexer_by_name
from pygments.token import STANDARD_TYPES
from pygments.util import ClassNotFound

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.tree import SyntaxTreeNode

MAX_TEXT = 20_000
MAX_BRACKETS = 1_000
MAX_CELLS = 10_000
"""The parser's time grows with the square of the brackets and of the table cells."""
MAX_TOKENS = 20_000
MAX_DEPTH = 40
MAX_HIGHLIGHTED = 10_000
"""Characters of code in one text that are highlighted."""
CACHE_SIZE = 512
MAX_CACHED_TEXT = 4_000

_LINK = re.compile(r"(?:https?://|mailto:)[^\x00-\x20]+", re.IGNORECASE)
_TASK = re.compile(r"\[([ xX])\](?:\s+|$)")
_NEWLINE = re.compile(r"\r\n?|\n")
_ALIGN = re.compile(r"text-align:(\w+)")


class _Element(Struct, tag_field="t"):
    pass


class Paragraph(_Element, tag="p"):
    c: list[Node]


class Heading(_Element, tag="h"):
    n: int
    c: list[Node]


class Quote(_Element, tag="quote"):
    c: list[Node]


class BulletList(_Element, tag="ul"):
    c: list[Node]


class OrderedList(_Element, tag="ol"):
    start: int
    c: list[Node]


class ListItem(_Element, tag="li"):
    """`task` is set on task list items: True if the task is done."""

    c: list[Node]
    task: bool | UnsetType = UNSET


class CodeBlock(_Element, tag="code"):
    """`tokens` holds pairs: Pygments' short class name (or an empty string) and a piece of code."""

    lang: str
    tokens: list[list[str]]


class Table(_Element, tag="table"):
    """A cell is a list of inline nodes."""

    align: list[str | None]
    head: list[list[Node]]
    rows: list[list[list[Node]]]


class Rule(_Element, tag="hr"):
    pass


class Emphasis(_Element, tag="em"):
    c: list[Node]


class Strong(_Element, tag="strong"):
    c: list[Node]


class Strikethrough(_Element, tag="s"):
    c: list[Node]


class InlineCode(_Element, tag="tt"):
    s: str


class Link(_Element, tag="a"):
    """`image` is set on pictures: they are only linked to, never loaded."""

    href: str
    host: str
    c: list[Node]
    image: bool | UnsetType = UNSET


class LineBreak(_Element, tag="br"):
    pass


Node: TypeAlias = (
    str
    | Paragraph
    | Heading
    | Quote
    | BulletList
    | OrderedList
    | ListItem
    | CodeBlock
    | Table
    | Rule
    | Emphasis
    | Strong
    | Strikethrough
    | InlineCode
    | Link
    | LineBreak
)

_CONTAINERS: dict[str, type[Paragraph | Quote | BulletList]] = {
    "paragraph": Paragraph,
    "blockquote": Quote,
    "bullet_list": BulletList,
}
_SPANS: dict[str, type[Emphasis | Strong | Strikethrough]] = {"em": Emphasis, "strong": Strong, "s": Strikethrough}


class _TooDeep(Exception):
    pass


def render(text: str) -> list[Node]:
    from markdown_it.tree import SyntaxTreeNode

    if len(text) > MAX_TEXT or text.count("[") > MAX_BRACKETS or _max_cells(text) > MAX_CELLS:
        return [text]
    tokens = _parser().parse(text)
    if sum(1 + len(token.children or ()) for token in tokens) > MAX_TOKENS:
        return [text]
    try:
        return _Renderer().blocks(SyntaxTreeNode(tokens).children, 0)
    except _TooDeep:
        return [text]


def render_growing(text: str) -> tuple[list[Node], int]:
    """Blocks of a text whose end is still missing, and the line at which the last block begins.

    Bold text and code at the end are closed, so that they do not change their form when their end arrives.
    """
    blocks, line = _render_blocks(text)
    if not blocks or isinstance(blocks[-1], str | CodeBlock | Table):
        return blocks, line
    last = "\n".join(_NEWLINE.split(text)[line:]).rstrip()
    mark = "`" if last.count("`") % 2 else "**" if last.count("**") % 2 else ""
    if not mark:
        return blocks, line
    whole = text.rstrip()
    closed, again = _render_blocks(whole.removesuffix(mark) if whole.endswith(mark) else whole + mark)
    return (closed, again) if again == line and closed else (blocks, line)


def _render_blocks(text: str) -> tuple[list[Node], int]:
    from markdown_it.tree import SyntaxTreeNode

    nodes = render(text)
    starts = [one.map[0] for one in SyntaxTreeNode(_parser().parse(text)).children if one.map] if len(nodes) > 1 else []
    return nodes, starts[-1] if starts and len(starts) == len(nodes) else 0


def render_json(text: str) -> msgspec.Raw:
    """The tree as JSON. Short texts are cached: many clients see the same message."""
    return _cached_json(text) if len(text) <= MAX_CACHED_TEXT else _encode(text)


def _encode(text: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(render(text)))


_cached_json = functools.lru_cache(CACHE_SIZE)(_encode)


@functools.cache
def _parser() -> MarkdownIt:
    # Imported here: most commands render nothing.
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": 2 * MAX_DEPTH}).enable(["table", "strikethrough"])
    parser.validateLink = lambda url: bool(_LINK.fullmatch(url))  # type: ignore[method-assign]
    return parser


def _max_cells(text: str) -> int:
    """The most cells that a table in the text can have: short rows are padded to the widest."""
    lines = text.split("\n")
    return len(lines) * max(line.count("|") for line in lines)


class _Renderer:
    """Renders one text; limits how much of its code is highlighted."""

    def __init__(self) -> None:
        self._highlightable = MAX_HIGHLIGHTED

    def blocks(self, parsed: Sequence[SyntaxTreeNode], depth: int) -> list[Node]:
        if depth > MAX_DEPTH:
            raise _TooDeep
        nodes: list[Node] = []
        for block in parsed:
            match block.type:
                case "inline":
                    nodes += _inline(block.children, 0)
                case "fence" | "code_block":
                    nodes.append(self._code(block))
                case "hr":
                    nodes.append(Rule())
                case "table":
                    nodes.append(self._table(block))
                case "paragraph" if block.hidden:  # in a list without blank lines
                    nodes += self.blocks(block.children, depth + 1)
                case "heading":
                    nodes.append(Heading(n=int(block.tag[1]), c=self.blocks(block.children, depth + 1)))
                case "ordered_list":
                    start = int(block.attrs.get("start", 1))
                    nodes.append(OrderedList(start=start, c=self.blocks(block.children, depth + 1)))
                case "list_item":
                    nodes.append(_list_item(self.blocks(block.children, depth + 1)))
                case container:
                    nodes.append(_CONTAINERS[container](c=self.blocks(block.children, depth + 1)))
        return nodes

    def _code(self, block: SyntaxTreeNode) -> Node:
        lang = block.info.split(maxsplit=1)[0].lower() if block.info.strip() else ""
        self._highlightable -= len(block.content)
        return CodeBlock(lang=lang, tokens=_highlight(block.content, lang if self._highlightable >= 0 else ""))

    def _table(self, table: SyntaxTreeNode) -> Node:
        head, *body = (row for section in table.children for row in section.children)
        aligns = [_ALIGN.search(str(cell.attrs.get("style", ""))) for cell in head.children]
        return Table(
            align=[align[1] if align else None for align in aligns],
            head=[self.blocks(cell.children, 0) for cell in head.children],
            rows=[[self.blocks(cell.children, 0) for cell in row.children] for row in body],
        )


def _inline(parsed: Sequence[SyntaxTreeNode], depth: int) -> list[Node]:
    if depth > MAX_DEPTH:
        raise _TooDeep
    nodes: list[Node] = []
    for span in parsed:
        match span.type:
            case "code_inline":
                nodes.append(InlineCode(s=span.content))
            case "hardbreak":
                nodes.append(LineBreak())
            case "softbreak":
                _append_text(nodes, "\n")
            case "link":
                href = str(span.attrs["href"])
                nodes.append(Link(href=href, host=_host(href), c=_inline(span.children, depth + 1)))
            case "image":
                href = str(span.attrs["src"])
                nodes.append(Link(href=href, host=_host(href), c=[span.content or href], image=True))
            case "em" | "strong" | "s":
                nodes.append(_SPANS[span.type](c=_inline(span.children, depth + 1)))
            case _:
                _append_text(nodes, span.content)
    return nodes


def _list_item(children: list[Node]) -> Node:
    """A list item; a task if its text begins with a box."""
    content = children[0].c if children and isinstance(children[0], Paragraph) else children
    if not content or not isinstance(content[0], str) or not (box := _TASK.match(content[0])):
        return ListItem(c=children)
    content[0] = content[0][box.end() :]
    return ListItem(c=children, task=box[1] != " ")


def _host(href: str) -> str:
    try:
        parts = urlsplit(href)
        return parts.path.rpartition("@")[2] if parts.scheme.lower() == "mailto" else parts.netloc.rpartition("@")[2]
    except ValueError:  # not a valid address in the brackets
        return ""


def _append_text(nodes: list[Node], text: str) -> None:
    if nodes and isinstance(nodes[-1], str):
        nodes[-1] += text
    elif text:
        nodes.append(text)


def _highlight(code: str, lang: str) -> list[list[str]]:
    """Pairs of class name and code; neighbours of the same class are joined."""
    try:
        lexer = get_lexer_by_name(lang, stripnl=False, ensurenl=False) if lang else None
    except ClassNotFound:
        lexer = None
    if lexer is None:
        return [["", code]] if code else []
    runs: list[list[str]] = []
    for kind, piece in lexer.get_tokens(code):
        name = _class_name(kind)
        if runs and runs[-1][0] == name:
            runs[-1][1] += piece
        else:
            runs.append([name, piece])
    return runs


def _class_name(kind: Any) -> str:
    """The short name of a token type; lexers' own types count as their nearest standard one."""
    while kind is not None and kind not in STANDARD_TYPES:
        kind = kind.parent
    return str(STANDARD_TYPES.get(kind, ""))
