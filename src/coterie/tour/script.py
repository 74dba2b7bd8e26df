"""Texts of the tour, in English and Chinese."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Translated:
    en: str
    zh: str

    def text(self, chinese: bool) -> str:
        return self.zh if chinese else self.en


NONE = Translated("", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    option: Translated = NONE
    """Quick reply that requests the scene."""
    cue: re.Pattern[str] | None = None
    """Free text that requests the scene."""
    says: Translated = NONE
    """Text before the tool call. An ellipsis is a long pause."""
    tool: str = ""
    """Tool that is called first, if the agent has it."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    then: Translated
    """Final message, with the remaining scenes as quick replies."""


WELCOME = Scene(
    then=Translated(
        "Hello! I am the guide, a small script inside Coterie and no real model: I know only what is on my buttons. "
        "A minute with me shows what Coterie does. This message came with quick replies: press one, or write to me in "
        "your own words.",
        "你好！我是导览，只是 Coterie 自带的一小段脚本，不是真正的模型：我只懂按钮上的这些事。"
        "跟我走一分钟，就知道 Coterie 能做什么。这条消息带着快捷回复：点一个试试，也可以自己写点什么。",
    )
)
HELLO = Scene(
    cue=re.compile(r"\A\W*((hello|hi|hey|good (morning|afternoon|evening))\b|你好|您好|嗨|哈喽)", re.I),
    then=Translated(
        "Hello to you, too! Writing in your own words is how you talk to a real model. I am a script and no real model "
        "and follow best what is on my buttons: press one and see what happens. “Set up a real model” leads to one "
        "that answers anything.",
        "你也好！像这样用自己的话写，就是和真正的模型说话的方式。我只是脚本，不是真正的模型，按钮上的话我最明白："
        "点一个看看会发生什么。想要什么都听得懂的，就点“设置真正的模型”。",
    ),
)
LANGUAGE = Scene(
    option=Translated("中文", "English"),
    then=Translated("All right, in English from now on. What shall I show you?", "好的，接下来说中文。想先看什么？"),
)
UNKNOWN = Scene(
    then=Translated(
        "I am scripted and did not understand that; a real model would. Here is what I can show:",
        "我只是脚本，没听懂这句话；换成真正的模型就能懂。我能演示这些：",
    )
)
DELAY = Scene(
    option=Translated("Send me something later", "过一会儿再发一条"),
    cue=re.compile(r"\b(delay(ed)?|later|remind)\b|延迟|稍后|提醒", re.I),
    says=Translated("I send you a message that arrives in ten seconds.", "我发一条十秒后才到的消息。"),
    tool="send_message",
    arguments={
        "to": "user",
        "payload": {"text": Translated("Ten seconds have passed: here I am.", "十秒到了：我来了。")},
        "delayMs": 10_000,
    },
    then=Translated(
        "It is on its way. It would arrive even if Coterie were restarted meanwhile. What next?",
        "已经上路了。中途重启 Coterie 它也会到。接下来看什么？",
    ),
)
TOOL = Scene(
    option=Translated("Use a tool", "用一个工具"),
    cue=re.compile(r"\btools?\b|工具", re.I),
    says=Translated("I ask who is here.", "我查一下都有谁在。"),
    tool="list_agents",
    then=Translated(
        "That was a tool run: you can unfold it above and see what I asked and what came back. What next?",
        "刚才运行了一个工具：在上面展开就能看到我问了什么、得到了什么。接下来看什么？",
    ),
)
ASK = Scene(
    option=Translated("Ask another agent", "问问别的智能体"),
    cue=re.compile(r"\b(an)?other agents?\b|\bsecond agent\b|\btasks?\b|别的智能体|其他智能体|任务", re.I),
    says=Translated("I ask the second agent what it does.", "我问问另一个智能体它做什么。"),
    tool="send_message",
    arguments={"to": "tour-seer", "payload": {"text": Translated("What do you do here?", "你在这里做什么？")}},
    then=Translated(
        "There is no second agent here that I could ask. With one, a line under your message would show who is at "
        "work for you. What next?",
        "这里没有别的智能体可以问。如果有，你的消息下方会有一行字，写着谁在为你工作。接下来看什么？",
    ),
)
"""`then` is sent only if there is no second agent; otherwise `ASKED`, and `ANSWERED` with the answer."""
INTERJECTION = Scene(
    option=Translated("Let me interrupt you", "让我插一句话"),
    cue=re.compile(r"\binterrupt|interject|插话|打断", re.I),
    says=Translated(
        "I count to ten, then I use a tool. Write something while I count. "
        "One… two… three… four… five… six… seven… eight… nine… ten.",
        "我数到十，然后用一个工具。趁我数的时候写点什么。 一… 二… 三… 四… 五… 六… 七… 八… 九… 十。",
    ),
    tool="list_agents",
    then=Translated(
        "You let me finish, so I used the tool. Ask again and write while I count. What next?",
        "你让我数完了，所以我用了工具。再来一次，趁我数的时候说话。接下来看什么？",
    ),
)
INTERRUPTED = Scene(
    then=Translated(
        "You spoke while I was at work. I dropped what I had planned, kept what was already done, and read you first: "
        "nothing you say gets lost. What next?",
        "你在我忙的时候说话了。我放下没做的计划，留下已经做完的，先读你的话：你说的都不会丢。接下来看什么？",
    ),
)
ATTACHMENT = Scene(
    option=Translated("What about pictures?", "图片怎么办？"),
    cue=re.compile(r"\b(picture|image|photo|attach|file)|图片|照片|附件|文件", re.I),
    then=Translated(
        "Drop any picture here and send it to me. My model cannot see: I get a description that names who can, and "
        "pass the picture on. You can watch that in the timeline, and I tell you what came back.",
        "拖一张图片进来发给我。我的模型看不见：我只收到一段说明，里面写着谁看得见，然后把图片转过去。"
        "转发的过程在时间线里看得到，对方说了什么我会告诉你。",
    ),
)
SETUP = Scene(
    option=Translated("Set up a real model", "设置真正的模型"),
    cue=re.compile(r"\b(set ?up|real model|api.?key|configure)\b|设置|配置|密钥", re.I),
    then=Translated(
        "Open the setup page (the banner above leads there). It shows the keys and the local model servers it finds "
        "and asks before it uses one. Or write your service into llmservices.json: id, baseURL and model are enough, "
        "as in "
        '`{"services": [{"id": "main", "baseURL": "http://127.0.0.1:11434/v1", "model": "…"}]}`. '
        "Your first service ends this tour: the assistant then thinks with it, and the scripted seer goes.",
        "打开设置页（上方横幅里有入口）：它会列出找到的密钥和本机的模型服务，用之前先问你。"
        "也可以把服务写进 llmservices.json，有 id、baseURL 和 model 就够了，例如 "
        '`{"services": [{"id": "main", "baseURL": "http://127.0.0.1:11434/v1", "model": "…"}]}`。'
        "有了第一个服务，导览就结束：助手改用它来思考，脚本扮演的 Seer 随之离开。",
    ),
)
SCENES = (DELAY, TOOL, ASK, INTERJECTION, ATTACHMENT, SETUP)


def welcome_translations() -> dict[str, Any]:
    """The greeting and its quick replies by language."""
    languages = {"en": False, "zh": True}
    return {
        code: {
            "text": WELCOME.then.text(chinese),
            "quickReplies": [scene.option.text(chinese) for scene in (*SCENES, LANGUAGE)],
        }
        for code, chinese in languages.items()
    }


ASKED = Translated(
    "I asked. Look at the line under your message: it shows who is at work for you.",
    "问过了。看你消息下方的那一行：它写着谁在为你工作。",
)
ASKS = re.compile("What do you do here|你在这里做什么")
DOES = Translated(
    "Let me think… This is what I do: I look at pictures for agents whose model cannot see.",
    "让我想想… 我做的事是：替看不见的智能体看图片。",
)
DONE = re.compile(r"(?:This is what I do:|我做的事是：)\s*([^\"\n]*)")
ANSWERED = Scene(
    then=Translated(
        "All of that was one task: your message, my question and the answer. The line under your message opens it, "
        "with its messages, its time and its cost, and can stop it while it lasts. What next?",
        "你的消息、我的问题和回答合起来是一个任务。点你消息下方的那一行就能打开它：里面有消息、用时和费用，进行中还能停止。接下来看什么？",
    )
)

PASSES_ON = Translated(
    "I cannot read {filename} ({mimeType}, {size} bytes), but {agent} can. I pass it on.",
    "我读不了 {filename}（{mimeType}，{size} 字节），但 {agent} 可以。我转过去。",
)
PASSED_ON = Translated("I will tell you what {agent} says.", "等 {agent} 回话，我就告诉你。")
PLEASE_LOOK = Translated("Please tell me what this is.", "请告诉我这是什么。")
NO_READER = Translated(
    "I cannot read {filename} ({mimeType}, {size} bytes), and nobody here can: set up a model that does.",
    "我读不了 {filename}（{mimeType}，{size} 字节），这里也没有谁可以：请设置一个能读的模型。",
)
SEES = Translated(
    "This is what I see: {}. I am scripted, so that is all.", "这是我看到的：{}。我只是脚本，只能说这么多。"
)
SEEN = re.compile(r"(?:This is what I see:|这是我看到的：)\s*([^\"\n]*)")
RELAYS = Translated("Here is the answer: {}", "回话来了：{}")
SHOWN = Scene(
    then=Translated(
        "So nothing you send breaks a conversation, whatever its model can read. What next?",
        "所以不管模型能读什么，你发的东西都不会弄坏对话。接下来看什么？",
    )
)
NOTHING_TO_SEE = Translated(
    "I am the one who sees, a script like the guide. Send me a picture.",
    "我是看得见的那个，和导览一样是脚本。发张图片给我吧。",
)
