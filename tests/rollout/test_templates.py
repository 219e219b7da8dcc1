import re

import pytest

from agentfactory.rollout.text.load_renderer import make_renderer
from agentfactory.rollout.text.parsers import load_parser
from agentfactory.rollout.text.probing.conversations import PROBE_TOOLS, make_call, results_of
from agentfactory.rollout.text.template_and_format import Choice, choose_template, training_variant
from agentfactory.rollout.text.templates import ChatTemplate, Closing, Closings, RenderError
from tests.chat_tokenizers import (
    SPECIAL,
    STRIPS_REASONING,
    TOOLS_IN_SYSTEM,
    TRL_TEMPLATES,
    make_tokenizer,
    trl_template,
)

CHATML_END = Closing(end="<|im_end|>", after="\n")


def choose(template: str, tools: bool = True, parser: str = "hermes") -> Choice:
    special = dict.fromkeys(["<|im_start|>", "<|im_end|>", *SPECIAL.findall(template), "<|endoftext|>"])
    tokenizer = make_tokenizer(special=tuple(special))
    return choose_template(tokenizer, template, tools, load_parser(parser))


CHATML = (
    TOOLS_IN_SYSTEM
    + """
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>\n' + {'name': c.function.name, 'arguments': c.function.arguments} | tojson + '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
)

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


def test_a_template_that_needs_tools_can_serve() -> None:
    # Hermes 2's iterates over them without asking whether there are any
    needing = CHATML.replace(
        "{%- for m in messages %}", "{%- for tool in tools %}{% endfor %}{%- for m in messages %}", 1
    )
    assert choose(needing).use == "append"
    with pytest.raises(RenderError, match="not iterable"):
        choose(needing, tools=False)


def test_a_template_that_prints_its_tools_as_python_can_serve() -> None:
    """Apriel 1.5's and 1.6's do; only calls in Python's notation are refused."""
    printed = CHATML.replace("{{ t | tojson }}", "{{ t }}")
    assert printed != CHATML
    assert choose(printed).use == "append"
    with pytest.raises(RenderError, match=r"cannot render a tool call|a format that rollout\.parser does not read"):
        choose(printed.replace("c.function.arguments} | tojson", "c.function.arguments} | string"))


def test_a_template_may_need_descriptions_of_parameters() -> None:
    properties = "{% for name, p in t.function.parameters.properties.items() %}{{ name + p.description }}{% endfor %}"
    needing = f"{properties}{{{{ t.function.name + t.function.parameters.required[0] }}}}"
    assert choose(CHATML.replace("{{ t | tojson }}", needing)).use == "append"


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
        assert renderer.end_of(bool(turn.get("tool_calls"))) == end
        start, whole = renderer.open([question], PROBE_TOOLS), renderer.open([question, turn, new], PROBE_TOOLS)
        for sampled in (renderer.continuation(said), [*renderer.continuation(f"{said}\n"), end]):
            following = renderer.extend([*start, *sampled], [question, turn, new], [new], PROBE_TOOLS)
            assert [*start, *sampled, *(following or ())] == whole
        row = renderer.conversation_row([question, turn, new], PROBE_TOOLS)
        assert [i for i, weight in zip(row.token_ids, row.mask, strict=True) if weight] == sampled


def test_a_refused_template_names_text_formats_only_if_it_renders_without_tools() -> None:
    def refusal(templates: str | dict[str, str]) -> str:
        tokenizer = make_tokenizer(special=("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
        tokenizer.chat_template = templates
        with pytest.raises(RenderError) as raised:
            make_renderer(tokenizer)
        return str(raised.value)

    names = "; act in plain text: rollout.parser=json or react or code_block or tags; or set model"
    other = "; set model"
    foreign = CHATML.replace("<tool_call>", "<invocation>").replace("</tool_call>", "</invocation>")
    needing = foreign.replace("{%- for m in messages %}", "{{ tools | length }}{%- for m in messages %}", 1)
    assert names in refusal(foreign)
    assert other in (message := refusal(needing))
    assert names not in message
    # text formats take the default template
    assert names in refusal({"default": CHATML, "tool_use": needing})
    assert names not in refusal({"default": needing, "tool_use": foreign})
    assert names not in refusal({"tool_use": foreign})


def test_a_template_may_always_end_with_the_generation_prompt_and_text_turns_with_two_tokens() -> None:
    """Command R7B's does."""
    always = CHATML.replace("{%- if add_generation_prompt %}", "{%- if true %}")
    always = always.replace("'<|im_end|>\n'", "('' if m.tool_calls else '<|endoftext|>') + '<|im_end|>\n'")
    choice = choose(always)
    assert choice.use == "append"
    words, calls = choice.behaviour.closings.words, choice.behaviour.closings.calls
    assert (words.end, words.after) == ("<|endoftext|>", "<|im_end|>\n<|im_start|>assistant\n")
    assert (calls.end, calls.after) == ("<|im_end|>", "\n<|im_start|>assistant\n")


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
        ("+ m.content }}", "+ (m.content if m.role != 'tool' else '') }}", "cannot render a tool message: it leaves"),
        ("'<|im_end|>\n'", "'<|im_end|>' + range(99999) | random | string", "differently each time"),
        ("m.content", "m.text", "refuses the conversation"),
        ("{%- for m", "{%- fro m", "refuses the conversation: Encountered unknown tag"),
    ],
)
def test_templates_that_cannot_serve_are_refused_with_the_reason(before: str, after: str, reason: str) -> None:
    assert choose(CHATML).use == "append"
    assert before in CHATML
    with pytest.raises(RenderError, match=reason):
        choose(CHATML.replace(before, after))


def test_without_tools_the_tool_probes_do_not_apply() -> None:
    assert choose(CHATML.replace(TOOLS_IN_SYSTEM, "").replace("m.tool_calls or []", "[]"), tools=False).use == "append"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (STRIPS_REASONING, "rewrites history: '<think>.*becomes 'word"),
        (CHATML.replace("+ m.content", "+ m.content.split('</think>')[-1].strip()"), "drops 'wordwhy' \\(reasoning\\)"),
        (CHATML.replace("+ m.role", "+ m.role ~ messages|length"), "rewrites history: an assistant turn does not"),
        (CHATML.replace("'<|im_end|>\n'", "('' if loop.last else '|') + '<|im_end|>\n'"), "rewrites history: "),
        (CHATML.replace("+ m.role", "+ m.role + ' ' ~ loop.index0"), "rewrites history: "),
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


def test_reasoning_is_placed_where_the_template_knows_it() -> None:
    assert choose(trl_template("qwen3")).behaviour.reasoning
    assert not choose(CHATML).behaviour.reasoning
    assert choose(trl_template("qwen3_5_think"), tools=False).behaviour.opens_reasoning


def test_continuation_is_what_the_template_puts_there() -> None:
    template = ChatTemplate(make_tokenizer(), trl_template("qwen2_5"))
    results = [{"role": "tool", "name": n, "tool_call_id": n, "content": f"saw {n}"} for n in ("a", "b")]
    text = template.continuation(
        [*results, {"role": "user", "content": "go on"}], None, Closings(CHATML_END, CHATML_END)
    )
    assert text == (
        "\n<|im_start|>user\n<tool_response>\nsaw a\n</tool_response>\n<tool_response>\nsaw b\n</tool_response>"
        "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )
