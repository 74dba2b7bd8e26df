"""`python -m tests.panel.screenshots`: takes the pictures in docs/images from a running society.

It walks the path of a newcomer too, and says how long that takes. Pictures that no document shows are deleted.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path

from playwright.async_api import Browser, Page, expect

from coterie.testing import Calls, Says
from tests.agent.stage import Bell
from tests.panel import chromium, ui
from tests.panel.harness import PHONE, Panel, open_panel
from tests.panel.newcomer import Newcomer

IMAGES = Path(__file__).parents[2] / "docs" / "images"
CAST = {
    "en": {
        "agents": {"chief": "Chief", "ada": "Ada", "code": "Cody", "research": "Rosa", "seer": "Iris"},
        "hello": "The work is shared out: **Rosa** gathers the sources, **Cody** draws the charts.",
        "please": "Please look at the figures of last week first.",
        "which": "Which one shall I begin with? You can also write your own answer.",
        "options": ["The weather", "My calendar", "The weekly report", "Sort yesterday's notes by who has to do what"],
        "wait": ["Do not send the mail before I have read it", "And export the table as well"],
        "later": "Time for your medicine",
        "note": "Results are in:\n\n| Region | Orders |\n|---|---|\n| North | 128 |\n| South | 96 |",
    },
    "zh": {
        "agents": {"chief": "总管", "ada": "阿析", "code": "小码", "research": "研研", "seer": "文文"},
        "hello": "已把任务分给**研研**和**小码**。",
        "please": "先看一下上周的数据。",
        "which": "要先做哪一项？也可以自己写。",
        "options": ["先看天气", "查日程", "写周报", "整理昨天会议的录音并把待办按负责人分组"],
        "wait": ["先别发邮件，等我看过再说", "另外把表格也导出一份"],
        "later": "该吃药了",
        "note": "结果来了：\n\n| 地区 | 订单 |\n|---|---|\n| 北 | 128 |\n| 南 | 96 |",
    },
}
TIMEOUT_MS = 60_000
"""A busy machine must not fail a picture."""
PLACES = ("inbox", "timeline", "org", "delayed", "artifacts", "setup")
LOCALES = {"en": "en-US", "zh": "zh-CN"}


def toml(names: dict[str, str]) -> str:
    parents = {"ada": "chief", "code": "chief", "research": "chief", "seer": "research"}
    tables = []
    for agent, name in names.items():
        parent = f'parent = "{parents[agent]}"\n' if agent in parents else ""
        tables.append(f'[agents.{agent}]\nname = "{name}"\n{parent}')
    return "\n".join(tables)


async def scene(panel: Panel, words: Mapping[str, object]) -> str:
    """Set up a running turn, a question, waiting and delayed messages and two files.

    Return the reference of the last file.
    """
    options, wait = words["options"], words["wait"]
    assert isinstance(options, list)
    assert isinstance(wait, list)
    await panel.send_as_agent(str(words["hello"]), by="chief")
    await panel.society.send(to="chief", text=str(words["please"]))
    await panel.stage.state("chief", "idle")
    await panel.send_as_agent(str(words["note"]), by="chief")
    Bell.may_end.clear()
    Bell.rang.clear()
    panel.server.script(Says(calls=(Calls("look", {"name": "report"}), Calls("ring", {"name": "report.xlsx"}))))
    await panel.society.send(to="chief", text="…", sender="research")
    await asyncio.wait_for(Bell.rang.wait(), 10)
    for text in wait:
        await panel.society.send(to="chief", text=text)
    await panel.send_as_agent(str(words["which"]), *options, by="chief")
    await panel.send_as_agent(str(words["later"]), by="ada")
    await panel.society.send(to="user", text=str(words["later"]), sender="chief", delay_ms=252_000)
    await panel.society.artifacts.put(b"region,orders\nNorth,128\nSouth,96\n", "orders.csv")
    return (await panel.society.artifacts.put(str(words["note"]).encode(), "report.md")).ref


async def shot(page: Page, name: str) -> None:
    await page.screenshot(path=IMAGES / f"{name}.png")


async def picture_path(browser: Browser) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with open_panel(Path(folder), browser) as panel:
            number = iter(range(1, 10))
            newcomer = Newcomer(
                panel, LOCALES["en"], shot=lambda page, name: shot(page, f"start-{next(number)}-{name}-en")
            )
            await newcomer.walk()
    assert len(newcomer.typed) == len(set(newcomer.typed)), "something was typed twice"
    print(f"the path of a newcomer took {newcomer.seconds:.1f} s with pictures; {len(newcomer.typed)} texts were typed")


async def picture_society(browser: Browser, language: str) -> None:
    words, locale = CAST[language], LOCALES[language]
    names = words["agents"]
    assert isinstance(names, dict)
    with tempfile.TemporaryDirectory() as folder:
        async with open_panel(Path(folder), browser, agents=toml(names)) as panel:
            panel.server.default = "ok"
            file = await scene(panel, words)
            for scheme in ("light", "dark") if language == "en" else ("light",):
                page = await panel.open("#/a/chief", locale=locale, color_scheme=scheme)
                await expect(page.locator(ui.WAITING).first).to_be_attached()
                await ui.to_end(page)
                await expect(page.locator(".quick-reply-btn").last).to_be_in_viewport()
                await shot(page, f"conversation-{language}-{scheme}")
            for place in PLACES if language == "en" else ():
                page = await panel.open(f"#/{place}", locale=locale)
                await expect(page.locator(f'[data-testid="screen-{place}"] > *').first).to_be_visible()
                await shot(page, f"{place}-{language}")
            if language == "en":
                page = await panel.open(f"#/artifacts/{file}", locale=locale)
                await expect(page.get_by_text("128")).to_be_visible()
                await shot(page, f"viewer-{language}")
                page = await panel.open("#/a/chief", locale=locale, viewport=PHONE)
                await ui.to_end(page)
                await expect(page.locator(".quick-reply-btn").last).to_be_in_viewport()
                await shot(page, f"phone-{language}")
            Bell.may_end.set()
            await panel.stage.state("chief", "idle")


def delete_unused() -> None:
    """Delete the pictures that no document shows."""
    root = IMAGES.parents[1]
    documents = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    shown = "\n".join(document.read_text() for document in documents)
    for picture in IMAGES.glob("*.png"):
        if f"images/{picture.name}" not in shown:
            picture.unlink()


async def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    expect.set_options(timeout=TIMEOUT_MS)
    async with chromium.launch() as browser:
        await picture_path(browser)
        for language in CAST:
            await picture_society(browser, language)
    delete_unused()


if __name__ == "__main__":
    asyncio.run(main())
