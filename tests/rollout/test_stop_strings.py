"""Stop strings of text formats: a turn ends with the token that completes one, and nothing after it is trained. On
engines: test_server_contract.py; with a trained habit: tests/vllm/vllm_text_format.py."""

import random
from collections import defaultdict
from pathlib import Path

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from agentfactory.rollout.text.load_renderer import make_renderer
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.text.stop_strings import StopWatch, find_stop, tokens_of
from agentfactory.rollout.trajectory import Trajectory
from tests.chat_tokenizers import make_tokenizer, trl_template
from tests.rollout.test_family_exactness import noisy_turns
from tests.rollout.test_token_exactness import check_rows
from tests.scripted_chains import ZERO, scripted_chains

LEARN = Path(__file__).parents[1] / "learn"
KEEPS, DROPS = LEARN / "thinks_and_keeps.jinja", LEARN / "thinks_and_drops.jinja"
NOTE = "<note>rain</note>\n"
ACTION = 'Thought: so\nAction: note\nAction Input: {"text": "rain"}'
BYTES = bytes_to_unicode()
"""The letter that byte-level tokenizers write for each byte."""
Exchange = tuple[list[int], list[int], str | None]
"""A prompt, the completion, and the stop string that ended it."""


def test_the_string_that_is_complete_first_is_found() -> None:
    assert find_stop("a b c", ["c", "b"]) == (2, "b")
    assert find_stop("ab", ["abc", "b"]) == (1, "b")
    assert find_stop("xx-x", ["x"], start=2) == (3, "x")
    assert find_stop("ab", []) is None


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("a\nObservation: b", "\nObservation:"),
        ("\u20ac\nObservation:", "\nObservation:"),
        ("\nObservation:\u20ac\u20ac and more", "\nObservation:"),
        ("a \u20ac\u20ac\u20ad b", "\u20ac\u20ad"),
        ("so: yes ", "yes "),
    ],
)
def test_a_turn_ends_with_the_token_that_completes_the_string(text: str, stop: str) -> None:
    tokenizer = make_tokenizer(trl_template("qwen2_5"))

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    # a split into bytes splits characters
    for ids in (tokenizer.encode(text), tokenizer.convert_tokens_to_ids([BYTES[byte] for byte in text.encode()])):
        assert decode(ids) == text
        watch = StopWatch([stop], decode)
        first = next(count for count in range(1, len(ids) + 1) if stop in decode(ids[:count]))
        assert [watch.completed(ids[:count]) for count in range(1, first + 1)] == [None] * (first - 1) + [stop]
        assert tokens_of(text.index(stop) + len(stop), ids, decode) == first


@pytest.mark.parametrize(
    ("parser", "text", "kept"),
    [
        ("react", f"{ACTION}\nObservation: noted. Final Answer: 3", f"{ACTION}\nObservation:"),
        ("tags", f"{NOTE}<information>noted</information><answer>3</answer>", f"{NOTE}<information>"),
    ],
)
async def test_what_is_sampled_after_a_stop_is_in_no_row(tmp_path: Path, parser: str, text: str, kept: str) -> None:
    # this server knows no stop strings
    last = "Final Answer: 3" if parser == "react" else "<answer>3</answer>"
    async with scripted_chains(tmp_path, [text, last], rollout={"parser": parser}) as chains:
        trajectory = await chains.run()
    assert trajectory.error is None
    assert not trajectory.malformed_turns
    assert trajectory.metrics["tool/note/calls"] == 1
    (row,) = trajectory.rows
    (_, start, end), _ = trajectory.turn_spans()
    said = chains.tokenizer.decode(row.token_ids[start:end])
    assert said.startswith(kept)
    assert kept not in chains.tokenizer.decode(row.token_ids[start : end - 1])
    assert chains.server.responses[0][: end - start] == row.token_ids[start:end]
    assert len(chains.server.responses[0]) > end - start
    # the turn keeps the stop string, and the template closes it
    assert f"{said}<|im_end|>\n<|im_start|>user\n" in chains.sent()[1]
    assert chains.server.requests[0]["sampling_params"]["stop"] == list(chains.runner.renderer.stops)


@pytest.mark.parametrize("reasoning", ["auto", "keep", "drop", "template"])
@pytest.mark.parametrize("template", [KEEPS, DROPS], ids=["keeps", "drops"])
@pytest.mark.parametrize("parser", ["react", "tags", "code_block"])
async def test_rows_are_what_was_sent_and_sampled(tmp_path: Path, parser: str, template: Path, reasoning: str) -> None:
    """Chains play against a server that samples actions, stop strings in the reasoning and after the action, in any
    split into tokens, cut turns, noise and control tokens: each sampled token is trained once, that a turn
    ends where its stop string does, and that one in the reasoning ends no turn."""
    renderer = make_renderer(make_tokenizer(template.read_text(encoding="utf-8")), parser=parser, reasoning=reasoning)
    action, stop = {
        "react": ('Action: run\nAction Input: {"code": "x"}', "\nObservation:"),
        "tags": ("<run>x</run>", "<information>"),
        "code_block": ("```python\nx\n```", "\n\nOutput:\n"),
    }[parser]
    fence = "```" if parser == "code_block" else ""
    thought, stopped_thought = "hm</think>\n\n", f"hm {fence}{stop} so</think>\n\n"
    texts = [
        *(thought + action, stopped_thought + action, thought + action + stop + " made up", stopped_thought),
        *(stopped_thought + action + stop + " made up", f"hm {fence}{stop}", action, thought + action[:-3]),
    ]

    framing = [i for i in renderer.tokenizer.added_tokens_decoder if i > 1]
    script = noisy_turns(renderer, texts, random.Random(f"{parser} {template.name} {reasoning}"), framing)
    source = "from agentfactory import tool\n\n@tool\ndef run(code: str) -> str:\n    'Run.'\n    return code * 2\n"
    fields = {"tools": ["notes.py:run"], "rewards": ["notes.py:nothing"]}
    fields |= {"rollout": {"max_turns": 6, "max_tokens": 200}}
    scripted = scripted_chains(tmp_path, script, source=source + ZERO, renderer=renderer, knows_stops=True, **fields)
    async with scripted as played:
        chains = await played.run_all([{"question": "go"}] * 12)
        server = played.server
    assert not any(chain.outcome.failed for chain in chains), {chain.error for chain in chains}
    prompts = [request["token_ids"] for request in server.requests]
    # the stop strings at which the server ended the ids
    stops = [(find_stop(renderer.decode(ids), renderer.stops) or (0, None))[1] for ids in server.responses]
    check_stops(renderer, chains, [*zip(prompts, server.responses, stops, strict=True)])


def check_stops(renderer: Renderer, chains: list[Trajectory], exchanges: list[Exchange]) -> dict[str, int]:
    """Assert that the rows are what was sent and sampled, and that turns end where their stop strings do. Return how
    many turns ended with one, and how many went on after one in the reasoning."""
    whole, continued = join_continued(exchanges)
    turns = check_rows(chains, [({"token_ids": prompt}, sampled) for prompt, sampled in whole])
    assert turns == sum(chain.turns for chain in chains)
    stopped = 0
    for chain in chains:
        for row, start, end in chain.turn_spans():
            ids = chain.rows[row].token_ids[start:end]
            count = renderer.stopped(ids)
            assert count in (None, len(ids)), "text after a stop string is in a row"
            stopped += count is not None
    assert stopped
    assert continued
    return {"turns": turns, "stopped": stopped, "continued": continued}


def join_continued(exchanges: list[Exchange]) -> tuple[list[tuple[list[int], list[int]]], int]:
    """Join each exchange that ended with a stop string in the reasoning with the exchange that continues it."""
    waiting = defaultdict(list)
    whole: list[tuple[list[int], list[int]]] = []
    continued = 0
    for prompt, sampled, stop in sorted(exchanges, key=lambda exchange: len(exchange[0])):
        begun = waiting[tuple(prompt)].pop() if waiting[tuple(prompt)] else None
        continued += begun is not None
        first, said = (prompt, sampled) if begun is None else (begun[0], begun[1] + sampled)
        if stop is None:
            whole.append((first, said))
        else:
            waiting[(*prompt, *sampled)].append((first, said))
    return whole + [left for lefts in waiting.values() for left in lefts], continued
