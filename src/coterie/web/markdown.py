"""Markdown as a tree that a page can build with `createElement`: data, never HTML.

A node is a string (plain text) or an object whose `t` says what it is. `c` holds its children.

    blocks    {"t": "p", "c": […]}                      paragraph
              {"t": "h", "n": 1…6, "c": […]}            heading
              {"t": "quote", "c": […]}                  blocks inside
              {"t": "ul", "c": [li…]}                   {"t": "ol", "start": 1, "c": [li…]}
              {"t": "li", "c": […], "task": true?}      `task` on a task: whether it is done
              {"t": "code", "lang": "python", "tokens": [["k", "def"], ["", " "], …]}
                                                        Pygments' short class names, "" for none
              {"t": "table", "align": ["left", null], "head": [[…], […]], "rows": [[[…], […]]]}
                                                        a cell is a list of inline nodes
              {"t": "hr"}
    inline    {"t": "em"|"strong"|"s", "c": […]}        {"t": "tt", "s": "code in a line"}
              {"t": "a", "href": "https://…", "host": "example.org", "c": […], "image": true?}
                                                        `image`: a picture that is only linked to, never loaded
              {"t": "br"}

Links go to http, https and mailto; any other stays the text it was written as, and so does HTML. What is too long or
too deep is one string: the text itself.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments.lexers import get_lexer_by_name
from pygments.token import STANDARD_TYPES
from pygments.util import ClassNotFound

Node = str | dict[str, Any]

MAX_TEXT = 20_000
MAX_BRACKETS = 1_000
MAX_CELLS = 10_000
"""Brackets and tables are where a parser's time grows with the square of the text."""
MAX_TOKENS = 20_000
MAX_DEPTH = 40
MAX_CODE = 10_000
"""Characters of code in one text that get colours."""
CACHED = 512
CACHED_TEXT = 4_000

_LINK = re.compile(r"(?:https?://|mailto:)[^\x00-\x20]+", re.IGNORECASE)
_TASK = re.compile(r"\[([ xX])\](?:\s+|$)")
_ALIGN = re.compile(r"text-align:(\w+)")
_INLINE = {"em_open": "em", "strong_open": "strong", "s_open": "s"}
_BLOCK = {"paragraph_open": "p", "blockquote_open": "quote", "bullet_list_open": "ul", "list_item_open": "li"}


class _TooDeep(Exception):
    pass


def render(text: str) -> list[Node]:
    if len(text) > MAX_TEXT or text.count("[") > MAX_BRACKETS or _cells(text) > MAX_CELLS:
        return [text]
    tokens = _parser().parse(text)
    if sum(1 + len(token.children or ()) for token in tokens) > MAX_TOKENS:
        return [text]
    try:
        return _Tree().blocks(iter(tokens), 0)
    except _TooDeep:
        return [text]


def rendered(text: str) -> msgspec.Raw:
    """The tree as JSON. Short texts are kept for a while: many clients see the same message."""
    return _kept(text) if len(text) <= CACHED_TEXT else _encoded(text)


def _encoded(text: str) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(render(text)))


_kept = functools.lru_cache(CACHED)(_encoded)


@functools.cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "maxNesting": 2 * MAX_DEPTH}).enable(["table", "strikethrough"])
    parser.validateLink = lambda url: bool(_LINK.fullmatch(url))  # type: ignore[method-assign]
    return parser


def _cells(text: str) -> int:
    """As many as a table could get: short rows are filled up to the widest."""
    lines = text.split("\n")
    return len(lines) * max(line.count("|") for line in lines)


class _Tree:
    """Builds the tree of one text; counts the code in it."""

    def __init__(self) -> None:
        self._code_left = MAX_CODE

    def blocks(self, tokens: Iterator[Token], depth: int) -> list[Node]:
        """Nodes up to the end of the block that `tokens` stands in."""
        if depth > MAX_DEPTH:
            raise _TooDeep
        nodes: list[Node] = []
        for token in tokens:
            if token.nesting < 0:
                break
            match token.type:
                case "inline":
                    nodes += self._inline(token)
                case "fence" | "code_block":
                    nodes.append(self._code(token))
                case "hr":
                    nodes.append({"t": "hr"})
                case "table_open":
                    nodes.append(self._table(tokens))
                case _:
                    nodes += self._block(token, self.blocks(tokens, depth + 1))
        return nodes

    def _block(self, token: Token, inside: list[Node]) -> list[Node]:
        match token.type:
            case "heading_open":
                return [{"t": "h", "n": int(token.tag[1]), "c": inside}]
            case "ordered_list_open":
                return [{"t": "ol", "start": int(token.attrs.get("start", 1)), "c": inside}]
            case "paragraph_open" if token.hidden:  # in a list without blank lines
                return inside
            case "list_item_open":
                return [_item(inside)]
        return [{"t": _BLOCK[token.type], "c": inside}] if token.type in _BLOCK else inside

    def _code(self, token: Token) -> Node:
        lang = token.info.split(maxsplit=1)[0].lower() if token.info.strip() else ""
        self._code_left -= len(token.content)
        return {"t": "code", "lang": lang, "tokens": _coloured(token.content, lang if self._code_left >= 0 else "")}

    def _table(self, tokens: Iterator[Token]) -> Node:
        head: list[list[Node]] = []
        rows: list[list[list[Node]]] = []
        align: list[str | None] = []
        for token in tokens:
            match token.type:
                case "table_close":
                    break
                case "th_open":
                    found = _ALIGN.search(str(token.attrs.get("style", "")))
                    align.append(found[1] if found else None)
                    head.append(self.blocks(tokens, 0))
                case "tr_open":
                    rows.append([])
                case "td_open":
                    rows[-1].append(self.blocks(tokens, 0))
        return {"t": "table", "align": align, "head": head, "rows": rows[1:]}

    def _inline(self, token: Token) -> list[Node]:
        return self._spans(iter(token.children or ()), 0)

    def _spans(self, tokens: Iterator[Token], depth: int) -> list[Node]:
        if depth > MAX_DEPTH:
            raise _TooDeep
        nodes: list[Node] = []
        for token in tokens:
            if token.nesting < 0:
                break
            match token.type:
                case "code_inline":
                    nodes.append({"t": "tt", "s": token.content})
                case "hardbreak":
                    nodes.append({"t": "br"})
                case "softbreak":
                    _add_text(nodes, "\n")
                case "link_open":
                    nodes.append(_link(str(token.attrs["href"]), self._spans(tokens, depth + 1)))
                case "image":
                    href = str(token.attrs["src"])
                    nodes.append({**_link(href, [token.content or href]), "image": True})
                case opened if opened in _INLINE:
                    nodes.append({"t": _INLINE[opened], "c": self._spans(tokens, depth + 1)})
                case _:
                    _add_text(nodes, token.content)
        return nodes


def _item(inside: list[Node]) -> Node:
    """A list item; one that begins with a box is a task."""
    place = inside
    if inside and isinstance(inside[0], dict) and inside[0]["t"] == "p":
        place = inside[0]["c"]
    if not place or not isinstance(place[0], str) or not (box := _TASK.match(place[0])):
        return {"t": "li", "c": inside}
    place[0] = place[0][box.end() :]
    return {"t": "li", "c": inside, "task": box[1] != " "}


def _link(href: str, inside: list[Node]) -> dict[str, Any]:
    return {"t": "a", "href": href, "host": _host(href), "c": inside}


def _host(href: str) -> str:
    try:
        parts = urlsplit(href)
        return parts.path.rpartition("@")[2] if parts.scheme.lower() == "mailto" else parts.netloc.rpartition("@")[2]
    except ValueError:  # an address in brackets that is none
        return ""


def _add_text(nodes: list[Node], text: str) -> None:
    if nodes and isinstance(nodes[-1], str):
        nodes[-1] += text
    elif text:
        nodes.append(text)


def _coloured(code: str, lang: str) -> list[list[str]]:
    """Runs of one colour."""
    try:
        lexer = get_lexer_by_name(lang, stripnl=False, ensurenl=False) if lang else None
    except ClassNotFound:
        lexer = None
    if lexer is None:
        return [["", code]] if code else []
    runs: list[list[str]] = []
    for kind, piece in lexer.get_tokens(code):
        name = STANDARD_TYPES.get(kind) or _nearest(kind)
        if runs and runs[-1][0] == name:
            runs[-1][1] += piece
        else:
            runs.append([name, piece])
    return runs


def _nearest(kind: Any) -> str:
    """Lexers make token types of their own; the standard one above it has the colour."""
    while kind is not None and kind not in STANDARD_TYPES:
        kind = kind.parent
    return str(STANDARD_TYPES.get(kind, ""))
