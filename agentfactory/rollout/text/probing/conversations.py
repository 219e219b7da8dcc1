"""Conversations for the probes of a template."""

from typing import Any

from agentfactory.base.messages import Message, ToolCall, ToolSpec
from agentfactory.rollout.images.parts import image_part, show_in_user_turns
from agentfactory.rollout.text.parsers import Call, Parser
from agentfactory.rollout.text.templates import Behaviour

_TURNS, _CHARACTERS = 24, 20_000
"""Length of the longest probe conversation, and of its longest text."""

PROBE_TOOLS = [
    ToolSpec(
        name,
        f"{name} does a thing",
        {
            "type": "object",
            "properties": {
                # some templates fail without a description or `required`, such as Command R+'s
                "zeta": {"type": "string", "description": "the zeta of the thing"},
                "alpha": {"type": "integer", "description": "the alpha of the thing"},
            },
            "required": ["zeta"],
        },
    )
    for name in ("probelook", "probemove")
]


def make_call(parser: Parser, name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    return ToolCall(parser.call_id(name, number), name, arguments).to_openai()


def probe_calls(parser: Parser, number: int, words: str = "") -> tuple[list[Message], list[Call]]:
    """Return a conversation that ends with a turn of one or two calls, and the calls."""
    calls = [
        make_call(parser, "probelook", 0, zeta="wordzeta", alpha=3),
        make_call(parser, "probemove", 1, alpha=4, zeta="wordeta"),
    ][:number]
    turn: Message = {"role": "assistant", "content": words, "tool_calls": calls}
    return [{"role": "user", "content": "wordask"}, turn], [
        (call["function"]["name"], call["function"]["arguments"]) for call in calls
    ]


def results_of(calls: list[dict[str, Any]]) -> list[Message]:
    return [
        {"role": "tool", "name": c["function"]["name"], "tool_call_id": c["id"], "content": f"wordresult{number}"}
        for number, c in enumerate(calls)
    ]


def short_conversations(behaviour: Behaviour, parser: Parser | None) -> list[list[Message]]:
    """Return conversations of all kinds that occur in chains, with the reasoning in the parser's place.

    Turns end with full stops, because many tokenizers would merge their last letters with a newline of the template.
    """

    def said(word: str, reason: str = "", calls: list[dict[str, Any]] | None = None) -> Message:
        message: Message = {"role": "assistant", "content": word}
        if reason and behaviour.reasoning:
            message["reasoning_content"] = reason
        elif reason:
            message["content"] = f"{behaviour.tags[0].strip()}\n{reason}\n{behaviour.tags[1]}\n\n{word}"
        if calls:
            message["tool_calls"] = calls if behaviour.parallel_calls else calls[-1:]
            message["content"] = message["content"] if behaviour.words_with_calls else ""
        return message

    def asked(word: str) -> Message:
        return {"role": "user", "content": word}

    conversations = [
        [
            asked("wordone"),
            said("wordtwo."),
            asked("wordthree"),
            said("wordfour."),
            asked("wordfive"),
            said("wordsix."),
        ],
        [asked("wordone"), said("wordtwo", "wordwhy"), asked("wordthree"), said("wordfour", "wordwherefore")],
    ]
    if parser is not None:
        look = make_call(parser, "probelook", 0, zeta="wordzeta", alpha=3)
        move = make_call(parser, "probemove", 1, alpha=4, zeta="wordeta")

        def result(call: dict[str, Any], word: str) -> Message:
            return {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": word}

        conversations += [
            [
                asked("wordone"),
                said("wordtwo", calls=[look]),
                result(look, "wordthree"),
                said("", calls=[move, look]),
                *([result(move, "wordfour")] if behaviour.parallel_calls else []),
                result(look, "wordfive"),
                said("wordsix"),
                asked("wordseven"),
                said("", calls=[move]),
                result(move, "wordeight"),
                said("wordnine"),
            ],
            [
                asked("wordone"),
                said("", "wordwhy", [look]),
                result(look, "wordtwo"),
                said("wordthree", "wordwherefore", [move]),
                result(move, "wordfour"),
                *([] if behaviour.questions_after_results else [said("wordmore.")]),
                asked("wordfive"),
                said("wordsix", "wordhence"),
                asked("wordseven"),
                said("wordeight", "wordthus"),
            ],
            # the reply to a malformed call has no call to refer to
            [
                asked("wordone"),
                said("wordtwo"),
                {"role": "tool" if behaviour.complains_as_tool else "user", "content": "wordthree"},
                said("wordfour"),
            ],
        ]
    if behaviour.images:
        image = image_part("image")
        seen = [{"type": "text", "text": "wordsee"}, image]
        conversations.append(
            [{"role": "user", "content": seen}, said("wordtwo."), asked("wordthree"), said("wordfour.")]
        )
        if parser is not None:
            told = [{**result(look, ""), "content": seen}]
            told = told if behaviour.images_of_tools else show_in_user_turns(told)
            conversations.append(
                [{"role": "user", "content": [image]}, said("wordtwo", calls=[look]), *told, said("wordfour.")]
            )
    if behaviour.system:
        conversations += [[{"role": "system", "content": "wordsystem"}, *c] for c in conversations]
    return conversations


def long_conversations(behaviour: Behaviour, parser: Parser | None) -> list[list[Message]]:
    """Return a conversation of many turns, and one of long messages: some templates drop old turns or cut long
    messages."""
    long = "wordlong " * (_CHARACTERS // 9)
    texts = ("wordmany.", long)
    conversations: list[list[Message]] = []
    for text, turns in zip(texts, (_TURNS, 2), strict=True):
        conversations.append([])
        for number in range(turns):
            question: Message = {"role": "user", "content": f"word{number} {text}"}
            conversations[-1] += [question, {"role": "assistant", "content": f"word{number} {text}"}]
        if parser is not None:
            conversations.append([{"role": "user", "content": "wordask"}])
            for number in range(turns):
                call = make_call(parser, "probelook", number, zeta=f"word{number}", alpha=number)
                turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
                told = {**results_of([call])[0], "content": f"word{number} {text}"}
                conversations[-1] += [turn, told]
            conversations[-1].append({"role": "assistant", "content": "wordend."})
    return conversations
