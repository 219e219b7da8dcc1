"""Conversations for the probes of a template."""

from typing import Any

from agentfactory.base.messages import Content, Message, ToolCall, ToolSpec
from agentfactory.rollout.images.parts import image_part, show_in_user_turns, text_part
from agentfactory.rollout.text.parsers import Call, Parser
from agentfactory.rollout.text.templates import Behaviour

_TURNS, _CHARACTERS = 24, 20_000

# some templates fail without a description or `required`, such as Command R+'s
_PARAMETERS = {
    "type": "object",
    "properties": {
        "zeta": {"type": "string", "description": "the zeta of the thing"},
        "alpha": {"type": "integer", "description": "the alpha of the thing"},
    },
    "required": ["zeta"],
}
PROBE_TOOLS = [ToolSpec(name, f"{name} does a thing", _PARAMETERS) for name in ("probelook", "probemove")]


def asked(content: Content) -> Message:
    return {"role": "user", "content": content}


def answered(content: str, calls: list[dict[str, Any]] | None = None) -> Message:
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


def result_of(call: dict[str, Any], content: Content) -> Message:
    return {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": content}


QUESTION = asked("wordask")
ANSWER = answered("wordanswer")


def make_call(parser: Parser, name: str, number: int = 0, **arguments: Any) -> dict[str, Any]:
    return ToolCall(parser.call_id(name, number), name, arguments).to_openai()


def _two_calls(parser: Parser) -> list[dict[str, Any]]:
    look = make_call(parser, "probelook", 0, zeta="wordzeta", alpha=3)
    return [look, make_call(parser, "probemove", 1, alpha=4, zeta="wordeta")]


def probe_calls(parser: Parser, number: int, words: str = "") -> tuple[list[Message], list[Call]]:
    """Return a conversation that ends with a turn of one or two calls, and the calls."""
    calls = _two_calls(parser)[:number]
    functions = [call["function"] for call in calls]
    return [QUESTION, answered(words, calls)], [(each["name"], each["arguments"]) for each in functions]


def results_of(calls: list[dict[str, Any]]) -> list[Message]:
    return [result_of(call, f"wordresult{number}") for number, call in enumerate(calls)]


def short_conversations(behaviour: Behaviour, parser: Parser | None) -> list[list[Message]]:
    """Return conversations of all kinds that occur in chains, with the reasoning in the parser's place. Turns end with
    full stops, because many tokenizers would merge their last letters with a newline of the template."""

    def said(word: str, reason: str = "", calls: list[dict[str, Any]] | None = None) -> Message:
        if reason and not behaviour.reasoning:
            word = f"{behaviour.tags[0].strip()}\n{reason}\n{behaviour.tags[1]}\n\n{word}"
        if calls:
            calls = calls if behaviour.parallel_calls else calls[-1:]
            word = word if behaviour.words_with_calls else ""
        fields = {"reasoning_content": reason} if reason and behaviour.reasoning else {}
        return answered(word, calls) | fields

    conversations: list[list[Message | str]] = [
        ["wordone", said("wordtwo."), "wordthree", said("wordfour."), "wordfive", said("wordsix.")],
        ["wordone", said("wordtwo", "wordwhy"), "wordthree", said("wordfour", "wordwherefore")],
    ]
    if parser is not None:
        look, move = _two_calls(parser)
        conversations += [
            [
                *("wordone", said("wordtwo", calls=[look]), result_of(look, "wordthree")),
                *(said("", calls=[move, look]), *([result_of(move, "wordfour")] if behaviour.parallel_calls else [])),
                *(result_of(look, "wordfive"), said("wordsix")),
                *("wordseven", said("", calls=[move]), result_of(move, "wordeight"), said("wordnine")),
            ],
            [
                *("wordone", said("", "wordwhy", [look]), result_of(look, "wordtwo")),
                *(said("wordthree", "wordwherefore", [move]), result_of(move, "wordfour")),
                *([] if behaviour.questions_after_results else [said("wordmore.")]),
                *("wordfive", said("wordsix", "wordhence"), "wordseven", said("wordeight", "wordthus")),
            ],
            # the reply to a malformed call has no call to refer to
            [
                *("wordone", said("wordtwo")),
                {"role": "tool" if behaviour.complains_as_tool else "user", "content": "wordthree"},
                said("wordfour"),
            ],
        ]
    if behaviour.images:
        image = image_part("image")
        seen = [text_part("wordsee"), image]
        conversations.append([asked(seen), said("wordtwo."), "wordthree", said("wordfour.")])
        if parser is not None:
            told = [result_of(look, seen)]
            told = told if behaviour.images_of_tools else show_in_user_turns(told)
            conversations.append([asked([image]), said("wordtwo", calls=[look]), *told, said("wordfour.")])
    messages = [[asked(each) if isinstance(each, str) else each for each in c] for c in conversations]
    system: Message = {"role": "system", "content": "wordsystem"}
    return [*messages, *([system, *c] for c in messages if behaviour.system)]


def long_conversations(parser: Parser | None) -> list[list[Message]]:
    """Return conversations of many turns, and of long messages: some templates drop old turns or cut long messages."""
    conversations = []
    for text, turns in (("wordmany.", _TURNS), ("wordlong " * (_CHARACTERS // 9), 2)):
        texts = [f"word{number} {text}" for number in range(turns)]
        conversations.append([message for each in texts for message in (asked(each), answered(each))])
        if parser is not None:
            calls = [make_call(parser, "probelook", n, zeta=f"word{n}", alpha=n) for n in range(turns)]
            pairs = [(answered("", [call]), result_of(call, each)) for call, each in zip(calls, texts, strict=True)]
            conversations.append([QUESTION, *(each for pair in pairs for each in pair), answered("wordend.")])
    return conversations
