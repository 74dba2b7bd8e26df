"""Markdown becomes a tree of allowed nodes, for any input."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.web.markdown import MAX_TEXT, render_growing, render_json
from coterie.web.markdown import render as render_nodes

KNOWN = {
    "p", "h", "quote", "ul", "ol", "li", "code", "table", "hr", "em", "strong", "s", "tt", "a", "br",
}  # fmt: skip


def nodes(tree: Any) -> list[dict[str, Any]]:
    found = []
    if isinstance(tree, dict):
        found.append(tree)
        tree = [tree.get(key, []) for key in ("c", "head", "rows")]
    if isinstance(tree, list):
        found += [node for item in tree for node in nodes(item)]
    return found


def render(text: str) -> list[Any]:
    tree: list[Any] = json.loads(bytes(render_json(text)))
    return tree


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("plain", [{"t": "p", "c": ["plain"]}]),
        ("a *b* **c** ~~d~~ `e`", [{"t": "p", "c": [
            "a ", {"t": "em", "c": ["b"]}, " ", {"t": "strong", "c": ["c"]}, " ", {"t": "s", "c": ["d"]}, " ",
            {"t": "tt", "s": "e"}]}]),
        ("## T", [{"t": "h", "n": 2, "c": ["T"]}]),
        ("> q", [{"t": "quote", "c": [{"t": "p", "c": ["q"]}]}]),
        ("3. a", [{"t": "ol", "start": 3, "c": [{"t": "li", "c": ["a"]}]}]),
        ("- [x] a\n- [ ] b\n- c", [{"t": "ul", "c": [
            {"t": "li", "c": ["a"], "task": True}, {"t": "li", "c": ["b"], "task": False}, {"t": "li", "c": ["c"]}]}]),
        ("a  \nb\nc", [{"t": "p", "c": ["a", {"t": "br"}, "b\nc"]}]),
        ("---", [{"t": "hr"}]),
        ("|a|b|\n|-|-:|\n|1|2|", [{"t": "table", "align": [None, "right"], "head": [["a"], ["b"]],
                                    "rows": [[["1"], ["2"]]]}]),
        ("```nope\nx\n```", [{"t": "code", "lang": "nope", "tokens": [["", "x\n"]]}]),
    ],
)  # fmt: skip
def test_markdown_becomes_nodes(text: str, tree: list[Any]) -> None:
    assert render(text) == tree


def test_code_is_coloured_and_loses_nothing() -> None:
    code = "\n\ndef f(x):\n    return 'é' # c\n\n"
    (node,) = render(f"```python\n{code}```")
    assert ["k", "def"] in node["tokens"]
    assert "".join(text for _, text in node["tokens"]) == code


def test_a_link_shows_its_target_and_an_image_becomes_a_link() -> None:
    assert render("[x](https://me@evil.example/p)") == [
        {"t": "p", "c": [{"t": "a", "href": "https://me@evil.example/p", "host": "evil.example", "c": ["x"]}]}
    ]
    assert render("![pic](http://a.example/b.png)") == [
        {"t": "p", "c": [
            {"t": "a", "href": "http://a.example/b.png", "host": "a.example", "c": ["pic"], "image": True}]}
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "[x](javascript:alert(1))",
        "[x](JaVaScRiPt:alert(1))",
        "[x](&#106;avascript:alert(1))",
        "[x](<java\tscript:alert(1)>)",
        "[x](data:text/html,<script>)",
        "[x](//evil.example)",
        "[x](/local)",
        "[x](vbscript:x)",
        "<javascript:alert(1)>",
        "![x](data:image/svg+xml,<svg>)",
        "[x][r]\n\n[r]: file:///etc/passwd",
    ],
)
def test_a_link_with_another_scheme_stays_text(text: str) -> None:
    assert all(node["t"] != "a" for node in nodes(render(text)))


def test_html_stays_text() -> None:
    assert render("<b onclick=x>hi</b>\n\n<script>1</script>") == [
        {"t": "p", "c": ["<b onclick=x>hi</b>"]},
        {"t": "p", "c": ["<script>1</script>"]},
    ]


@pytest.mark.parametrize("text", ["x" * (MAX_TEXT + 1), ">" * 200 + "x", "**" * 200 + "x" + "**" * 200, "[" * 2000])
def test_text_that_is_too_long_or_too_deep_is_not_parsed(text: str) -> None:
    assert render(text) == [text]


@pytest.mark.parametrize(
    "piece", ["[", "![", "*a ", "_a_ ", "`", "<", "|a", "|a|\n|-|\n", "> ", "- ", "~~", "&", "\\["]
)
def test_rendering_takes_less_than_a_second_for_any_pattern(piece: str) -> None:
    text = (piece * MAX_TEXT)[:MAX_TEXT]
    start = time.process_time()
    render(text)
    assert time.process_time() - start < 1.0


@given(st.text(alphabet=st.sampled_from("ab [](){}<>!*_~`#-+|:\\\n\t0.1&\"'é中x/https:"), max_size=200))
def test_any_text_gives_only_allowed_nodes_and_links(text: str) -> None:
    for node in nodes(render(text)):
        assert node["t"] in KNOWN
        assert node["t"] != "a" or node["href"].lower().startswith(("http://", "https://", "mailto:"))


def test_a_growing_text_is_rendered_at_every_length_and_its_final_blocks_stay() -> None:
    text = "# Plan\n\nIt is **bold** and `code`.\n\n- one\n- two\n\n```py\nx = 1\n```\n\n| a |\n|---|\n| 1 |\n\n> end"
    final = render_nodes(text)
    for length in range(len(text) + 1):
        blocks, line = render_growing(text[:length])
        settled = "\n".join(text[:length].split("\n")[:line])
        assert render_nodes(settled) == final[: len(blocks) - 1] if line else len(blocks) <= 1
    assert render_growing(text)[0] == final
    assert render_growing("Now **bold")[0] == render_nodes("Now **bold**")
    assert render_growing("Now `code")[0] == render_nodes("Now `code`")
    assert render_growing("")[0] == []
