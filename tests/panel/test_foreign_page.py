"""A page of another program on the same machine, in a logged-in browser that sends its cookie."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.panel.harness import Panel

PAGE = """<!doctype html><title>elsewhere</title><script>
async function attack(panel) {
    const url = `${panel}/api/v1/messages`;
    const body = '{"to": "ada", "payload": {"text": "from elsewhere"}}';
    const outcome = (promise) => promise.then(
        (answer) => (answer.type === 'opaque' ? 'opaque' : `read ${answer.status}`), () => 'kept out');
    const send = (type, mode) => outcome(fetch(
        url, {method: 'POST', credentials: 'include', mode, headers: {'Content-Type': type}, body}));
    const streamed = new Promise((done) => {
        const stream = new EventSource(`${panel}/api/v1/events`, {withCredentials: true});
        stream.onopen = () => done('streamed');
        stream.onerror = () => { stream.close(); done('kept out'); };
    });
    const posted = new Promise((done) => {
        const frame = Object.assign(document.createElement('iframe'), {name: 'frame'});
        const form = Object.assign(document.createElement('form'), {
            action: url, method: 'POST', enctype: 'text/plain', target: 'frame'});
        form.append(Object.assign(document.createElement('input'), {name: body.slice(0, -1), value: ' }'}));
        document.body.append(frame, form);
        frame.onload = () => done('posted');
        form.submit();
    });
    return {
        json: await send('application/json', 'cors'), simple: await send('text/plain', 'no-cors'),
        read: await outcome(fetch(`${panel}/api/v1/snapshot`, {credentials: 'include'})), stream: await streamed,
        form: await posted,
    };
}
</script>"""


@asynccontextmanager
async def elsewhere() -> AsyncIterator[str]:
    """Address of a foreign server."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {len(PAGE)}\r\nConnection: close\r\n\r\n"
        writer.write((head + PAGE).encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_foreign_page_on_the_same_machine_can_neither_write_nor_read_nor_stream(panel: Panel) -> None:
    context = await panel.browser()
    panel.allow(".*")  # the browser logs every blocked request
    async with elsewhere() as url:
        page = await context.new_page()
        await page.goto(url)
        came = await page.evaluate("panel => attack(panel)", panel.url)

    kept_out = dict.fromkeys(("json", "simple", "read", "stream"), "kept out")
    assert came == kept_out | {"form": "posted"}
    # The requests arrived and were refused.
    metrics = (await panel.app.state.metrics.render()).decode().splitlines()
    posts = [line for line in metrics if "duration_seconds_count" in line and 'method="POST"' in line]
    assert len(posts) == 1 and posts[0].endswith('status="403"} 2.0')
    assert await panel.texts() == [] and await panel.society.store.history("ada") == []
