import re

import pytest

from agentfactory.rollout.text.load_renderer import make_renderer
from agentfactory.rollout.text.parsers import load_parser
from agentfactory.rollout.text.probing.conversations import PROBE_TOOLS, make_call, results_of
from agentfactory.rollout.text.template_and_format import Choice, choose_template, training_variant
from agentfactory.rollout.text.templates import RenderError
from tests.chat_tokenizers import (
    SPECIAL,
    STRIPS_REASONING,
    TOOLS_IN_SYSTEM,
    TRL_TEMPLATES,
    chatml,
    make_tokenizer,
    trl_template,
)


def choose(template: str, tools: bool = True, parser: str = "hermes") -> Choice:
    special = dict.fromkeys(["<|im_start|>", "<|im_end|>", *SPECIAL.findall(template), "<|endoftext|>"])
    tokenizer = make_tokenizer(special=tuple(special))
    return choose_template(tokenizer, template, tools, load_parser(parser))


CHATML = chatml("""{%- set call = {'name': c.function.name, 'arguments': c.function.arguments} %}
{{- '<tool_call>\n' + call | tojson + '\n</tool_call>' }}""")

UNREAD, UNSHOWN = "a format that rollout.parser does not read", "ignores `tools`"
WITH_TOOLS = {
    "append": ("qwen2_5", "qwen3_training", "qwen3_instruct_2507", "qwen3_vl"),
    "training variant": ("qwen3",),
    UNREAD: ("qwen3_5_think", "glm4moe", "gptoss", "llama3_1", "lfm2_v2", "nemotron_3_nano"),
    UNSHOWN: ("llama3", "gemma3", "phi3", "cohere2", "deepseekv3"),
    "cannot render a tool call": ("lfm2",),
    "drops text from a message": ("smolvlm",),
    "refuses the conversation": ("llava_next",),
}
WITHOUT_TOOLS = {
    "append": ("qwen2_5", "llama3_1", "gemma3", "phi3", "cohere2"),
    "training variant": ("qwen3", "qwen3_5_think"),
    "fork": ("qwen3_5_nothink", "deepseek_r1_distill", "gptoss", "glm4moe", "nemotron_3_nano"),
    "drops text from a message": ("smolvlm",),
}


@pytest.mark.parametrize(
    ("name", "tools", "expected"),
    [
        (name, verdicts is WITH_TOOLS, expected)
        for verdicts in (WITH_TOOLS, WITHOUT_TOOLS)
        for expected, names in verdicts.items()
        for name in names
    ],
)
def test_published_templates(name: str, tools: bool, expected: str) -> None:
    if expected in ("append", "training variant", "fork"):
        choice = choose(trl_template(name), tools)
        assert choice.use == expected
        assert choice.reasons
        assert (choice.variant is not None) == (expected == "training variant")
    else:
        with pytest.raises(RenderError, match=expected):
            choose(trl_template(name), tools)


def test_variants_are_those_of_trl() -> None:
    from trl.chat_template_utils import get_training_chat_template

    tokenizer = make_tokenizer()
    for file in TRL_TEMPLATES.glob("*.jinja"):
        tokenizer.chat_template = file.read_text(encoding="utf-8")
        ours = training_variant(tokenizer.chat_template)
        try:
            theirs = get_training_chat_template(tokenizer)
        except Exception:  # TRL has none, or its own probe cannot render the template
            continue
        if theirs is not None:
            assert ours is not None, file.stem
            assert ours[1] == theirs, file.stem


def test_a_turn_may_be_closed_only_before_the_next_message() -> None:
    """Apriel 1.6's template writes a line break and the end-of-turn token there."""
    closing = "'\n<|im_end|>\n' if m.role != 'assistant' or not loop.last else ''"
    template = CHATML.replace("'<|im_end|>\n'", closing)
    renderer = make_renderer(make_tokenizer(template, special=("<|im_start|>", "<|im_end|>", "<|endoftext|>")))
    assert renderer.info["choice"] == "append"
    call = make_call(renderer.parser, "probelook", zeta="3")
    question = {"role": "user", "content": "Where?"}
    text = '<tool_call>\n{"name": "probelook", "arguments": {"zeta": "3"}}\n</tool_call>'
    for said, turn, new in (
        ("Here.", {"role": "assistant", "content": "Here."}, question),
        (text, {"role": "assistant", "content": "", "tool_calls": [call]}, *results_of([call])),
    ):
        end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert renderer.ends[bool(turn.get("tool_calls"))] == end
        start, whole = renderer.open([question], PROBE_TOOLS), renderer.open([question, turn, new], PROBE_TOOLS)
        for sampled in (renderer.continuation(said), [*renderer.continuation(f"{said}\n"), end]):
            following = renderer.extend([*start, *sampled], [question, turn, new], [new], PROBE_TOOLS)
            assert [*start, *sampled, *(following or ())] == whole
        row = renderer.conversation_row([question, turn, new], PROBE_TOOLS)
        assert [i for i, weight in zip(row.token_ids, row.mask, strict=True) if weight] == sampled


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("{%- if add_generation_prompt %}", "{%- if false %}", "no generation prompt"),
        ("{%- for c in m.tool_calls or [] %}", "{%- for c in [] %}", "cannot render a tool call: it leaves them out"),
        ("\n</tool_call>'", "\n</call>'", "a format that rollout.parser does not read"),
        ("'<|im_end|>\n' }}", "'<|im_end|>\n' if not m.tool_calls else '<eom>' }}", "closes a turn with calls"),
        (
            *("+ m.content }}", "+ (m.content if m.role != 'tool' else raise_exception('no tools here')) }}"),
            "cannot render a tool message: .*no tools here",
        ),
        ("'<|im_end|>\n'", "'<|im_end|>' + range(99999) | random | string", "differently each time"),
        ("{%- for m", "{%- fro m", "refuses the conversation: Encountered unknown tag"),
    ],
)
def test_templates_that_cannot_serve_are_refused_with_the_reason(before: str, after: str, reason: str) -> None:
    assert choose(CHATML).use == "append"
    assert before in CHATML
    with pytest.raises(RenderError, match=reason):
        choose(CHATML.replace(before, after))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (STRIPS_REASONING, "rewrites history: '<think>.*becomes 'word"),
        (CHATML.replace("+ m.content", "+ m.content.split('</think>')[-1].strip()"), "drops 'wordwhy' \\(reasoning\\)"),
        (CHATML.replace("+ m.role", "+ m.role ~ messages|length"), "rewrites history: an assistant turn does not"),
        (CHATML.replace("'<|im_end|>\n'", "('' if loop.last else '|') + '<|im_end|>\n'"), "rewrites history: "),
    ],
)
def test_templates_that_rewrite_history_fork(template: str, reason: str) -> None:
    choice = choose(template)
    assert choice.use == "fork"
    assert re.search(reason, choice.reasons[0]), choice.reasons


def test_notes() -> None:
    no_system = CHATML.replace("+ m.content", "+ (raise_exception('no') if m.role == 'system' else m.content)")
    choice = choose(no_system)
    assert choice.use == "append"
    assert "has no system messages: a conversation with one is refused" in choice.behaviour.notes
    one = choose(CHATML.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"))
    assert not one.behaviour.parallel_calls
    assert "writes only one tool call in one turn: a turn with several is malformed" in one.behaviour.notes
    unseen = choose(CHATML.replace(TOOLS_IN_SYSTEM, ""))
    assert not unseen.behaviour.shows_tools
    assert "ignores `tools`: the system message describes them" in unseen.behaviour.notes
    assert "refuses two user messages in a row" in choose(trl_template("gemma3"), tools=False).behaviour.notes
