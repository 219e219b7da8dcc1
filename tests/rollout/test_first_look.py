"""The look at finished chains: figures, the formats that read what a model writes, words, advice, and alarms."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.findings import Finding
from agentfactory.base.messages import ToolSpec
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.config import RolloutConfig
from agentfactory.rollout.evaluation.advice import Alarms, advise
from agentfactory.rollout.evaluation.evaluate import offer_of
from agentfactory.rollout.evaluation.first_look import (
    FirstGroups,
    Look,
    Offer,
    describe,
    format_name,
    formats_that_read,
    look_at,
)
from agentfactory.rollout.evaluation.rules import ENOUGH_CHAINS
from agentfactory.rollout.text.parsers import PARSERS, load_parser
from agentfactory.rollout.trajectory import Activity, Group, Outcome, Stretch, Trajectory
from tests.scripted_chains import scripted_chains

CALCULATE = ToolSpec(
    "calculate",
    "Compute.",
    {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
)
BARE = '{"name": "calculate", "arguments": {"expression": "1 + 2"}}'


def offer(parser: str = "hermes", specs: Sequence[ToolSpec] = (CALCULATE,), **fields: Any) -> Offer:
    return Offer(RolloutConfig(**{"parser": parser, "group_size": 4, **fields}), specs, load_parser(parser))


def chain(text: str, reward: float | None = 0.0, outcome: str = "completed", **metrics: float) -> Trajectory:
    """A chain of one turn, or of a turn with a call and an answer if `tool_calls` is given."""
    calls = [{"id": "call_0", "type": "function", "function": {"name": "calculate", "arguments": "{}"}}]
    said: list[dict[str, Any]] = [{"role": "assistant", "content": text}]
    if metrics.get("tool_calls"):
        said = [{"role": "assistant", "content": text, "tool_calls": calls}, {"role": "assistant", "content": "3"}]
    opening = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "of the task"}]
    made = Trajectory("c", [*opening, *said], [], Outcome(outcome), reward, {"sampled_tokens": 20, **metrics})
    made.turns, made.seconds = len(said), 2.0
    return made


def groups(*chains: Trajectory, size: int = 4) -> list[Group]:
    parts = [list(chains[first : first + size]) for first in range(0, len(chains), size)]
    return [Group(f"g{number}", {"question": number}, part) for number, part in enumerate(parts)]


def told(look: Look) -> dict[str, str]:
    return {advice.topic: str(advice) for advice in advise(look)}


def test_the_tools_and_calls_of_an_agent_are_told_apart_from_the_models() -> None:
    acts = replace(offer(), own_loop=True)
    own = replace(acts, specs=[replace(CALCULATE, name="search")])
    for given, called, read in ((own, chain("", tool_calls=1), 4), (acts, chain("3"), 0)):
        called.metrics["tool_calls"] = 1
        look = look_at(groups(*[called] * 4), given)
        assert (look.called, look.own, look.read, look.unread) == (4, 4, read, [])
        assert "4 of 4 chains called a tool (4 of them the agent's own, or in its own code)" in describe(look)[1]
    assert look_at(groups(chain("", tool_calls=1)), acts).own == 0


def test_calls_in_another_format_are_found_and_named_with_their_share() -> None:
    look = look_at(groups(*[chain(BARE)] * 6, chain("It is 3."), chain('I use "calculate" now.')), offer())
    assert (look.chains, look.called, look.first_turns, look.read) == (8, 0, 8, 0)
    name, read = look.other_format or ("", 0)
    assert read == 6
    assert load_parser(name).parse(BARE, [CALCULATE]).calls == [("calculate", {"expression": "1 + 2"})]
    assert look.named == 1
    advice = told(look)["tool calls"]
    assert advice.startswith("no chain of 8 in 2 groups called a tool, though calculate is offered; ")
    assert f"{name} reads a call in 6 of 8 first turns (75%), hermes in 0; " in advice


@pytest.mark.parametrize("name", [name for name in PARSERS if name != "code_block"])
def test_every_format_is_recognised_by_what_it_writes(name: str) -> None:
    text = load_parser(name).write([("calculate", {"expression": "1 + 2"})], [CALCULATE])
    assert formats_that_read([text, "an answer"], [CALCULATE])[name] == 1
    assert format_name(load_parser(name)) == name


def test_the_words_say_what_happened() -> None:
    chains = [
        chain("", 1.0, tool_calls=1),
        chain("so <tool_call>", outcome="max_turns", **{"tool_errors/unknown_tool": 2}),
        chain("a long\nanswer", outcome="max_tokens", truncated_turns=1),
        chain("", None, "tool_infrastructure"),
        *[chain("3", 0.5)] * 4,
    ]
    chains[1].malformed_turns, chains[3].error = [0], "the server died"
    chains[0].timeline = [Stretch(Activity.WAIT, 0.0, 8.0, name="pad"), Stretch(Activity.WAIT, 0.0, 9.0, 0, "pad")]
    lines = describe(look_at(groups(*chains), offer()))
    assert lines == [
        "8 chains of 2 tasks",
        "calls: 1 of 8 chains called a tool, 1 had a malformed turn, 1 had a turn cut at rollout.max_tokens=512, "
        "2 calls ended as unknown_tool",
        "first turns: hermes reads a call in 1 of 8",
        "first turn (reward 1) [calls calculate {}]",
        "first turn (reward 0.5) 3",
        "first turn (reward 0) so <tool_call>",
        "ends: 5 completed, 1 max_turns, 1 max_tokens, 1 tool_infrastructure; 1 of 8 chains ended as "
        "tool_infrastructure, such as: the server died",
        "rewards: mean 0.429, from 0 to 1; they differ in 1 of 2 groups: the others would teach nothing",
        "a chain: 20 tokens sampled, 2.0 s, 1.1 s of it waiting for pad",
    ]
    assert describe(look_at([], offer())) == ["0 chains of 0 tasks"]


def test_advice_on_rewards_that_are_all_equal() -> None:
    nothing = told(look_at(groups(*[chain("3", 0.0)] * 8), offer()))["equal rewards"]
    assert nothing.startswith("the rewards of all 8 chains in 2 groups are 0: such groups teach nothing; fix: easier")
    assert "harder rows" in told(look_at(groups(*[chain("3", 1.0)] * 8), offer()))["equal rewards"]
    by_group = told(look_at(groups(*[chain("3", 1.0)] * 4, *[chain("3", 0.0)] * 4), offer()))["equal rewards"]
    assert by_group.startswith("in each of 2 groups all chains have the same reward")
    # a teacher alone grades the tokens, whatever the rewards
    graded = look_at(groups(*[chain("3", 0.0)] * 8), replace(offer(), judged=False))
    assert "equal rewards" not in told(graded)
    assert not any("teach" in line for line in describe(graded))
    # turn rewards teach, too
    turns = [chain("", 0.0, tool_calls=1) for _ in range(4)]
    for number, one in enumerate(turns):
        one.turn_rewards = [float(number)]
    look = look_at(groups(*turns), offer())
    assert told(look) == told(look_at(groups(*turns, size=1), offer())) == {}
    assert "rewards: all 0, with different turn rewards; they differ in 1 of 1 group" in describe(look)
    # one chain a task says nothing of groups
    alone = groups(*[chain("3", 1.0), chain("3", 0.0)], size=1)
    assert "equal rewards" not in told(look_at(alone, offer()))
    assert "is not known, because each task has one chain" in "\n".join(describe(look_at(alone, offer())))


def test_a_turn_is_shown_without_the_control_characters_of_a_terminal() -> None:
    look = look_at(groups(chain("Café\n\x1b[2J\x00\u202e\udc80 \x9b")), offer())
    assert look.shown == [r"(reward 0) Café\n\x1b[2J\x00\u202e\udc80 \x9b"]


def test_failed_chains_are_no_evidence_against_the_model() -> None:
    dead = [chain("", None, "tool_infrastructure") for _ in range(60)]
    assert told(look_at(groups(*dead), offer())) == {}
    assert [one for group in groups(*dead * 8) for one in Alarms(offer(), 2).note(group)] == []
    # a chain that failed before its first turn takes no time
    for one in dead:
        one.metrics, one.seconds = {"sampled_tokens": 0.0}, 0.0
    look = look_at(groups(*dead, *[chain("", 0.0, tool_calls=1)] * 4), offer())
    assert (look.tokens, look.seconds) == (20, 2.0)


def test_advice_on_cut_turns_and_on_too_few_calls() -> None:
    called = [chain("", 1.0, tool_calls=1), chain("", 0.0, tool_calls=1)]
    assert told(look_at(groups(*called * 4), offer())) == {}
    cut = look_at(groups(*called, chain("", tool_calls=1, truncated_turns=2)), offer(max_tokens=100))
    shown = "rollout.max_tokens=100 cut a turn of 1 of 3 chains; fix: rollout.max_tokens=200"
    assert told(cut)["cut turns"].startswith(shown)
    # one call in each group suffices to learn whether calls pay
    some = groups(called[0], *[chain("3")] * 3, called[1], *[chain("3")] * 3)
    assert told(look_at(some, offer())) == {}
    few = told(look_at([*some, *groups(*[chain("3")] * 4)], offer()))["tool calls"]
    assert few.startswith("only 2 of 12 chains called a tool, fewer than 1 in 4, though calculate is offered; fix: say")
    assert "tool calls" not in told(look_at(groups(*[chain("3")] * 4), offer(specs=())))


def test_calls_of_tools_that_do_not_exist_are_no_calls() -> None:
    invented = [chain("", tool_calls=2, **{"tool_errors/unknown_tool": 2}) for _ in range(4)]
    look = look_at(groups(*invented), offer())
    assert look.called == 0
    assert "; 8 calls named a tool that does not exist; fix: " in told(look)["tool calls"]
    assert look_at(groups(chain("", tool_calls=3, **{"tool_errors/unknown_tool": 2})), offer()).called == 1


def test_advice_on_malformed_calls() -> None:
    wrong = [chain("<tool_call>") for _ in range(3)]
    for one in wrong:
        one.malformed_turns = [0]
    none = told(look_at(groups(*wrong, chain("3")), offer()))
    assert "; 3 had a turn that hermes could not read; fix: another rollout.parser" in none["tool calls"]
    assert "malformed turns" not in none
    some = told(look_at(groups(*wrong, chain("", tool_calls=1)), offer()))
    assert some["malformed turns"].startswith("3 of 4 chains had a turn that hermes could not read; fix: another")
    for one in wrong:
        one.metrics["truncated_turns"] = 1.0
    cut = told(look_at(groups(*wrong, chain("", tool_calls=1)), offer()))
    assert ("malformed turns" in cut, "cut turns" in cut) == (False, True)


async def test_chains_as_they_run(tmp_path: Path) -> None:
    """With real chains: a call, a malformed one, and JSON that the template's format does not read."""
    call = '<tool_call>\n{"name": "note", "arguments": {"text": "x"}}\n</tool_call>'
    bare = '{"name": "note", "arguments": {"text": "x"}}'
    async with scripted_chains(tmp_path, [call, "done", "<tool_call>\n{", "done", bare]) as scripted:
        runner = scripted.runner
        chains = [await runner.run(f"g.{n}", {"question": "go"}, Sampling("policy", 1.0, seed="s")) for n in range(3)]
        look = look_at([Group("g", {}, chains)], offer_of(runner))
    assert (look.called, look.malformed, look.read) == (1, 1, 1)
    assert look.offer.format == "hermes (rollout.parser=auto)"
    assert (look.other_format or ("", 0))[1] == 1
    assert look.shown[0] == '(reward 2) [calls note {"text": "x"}]'
    assert re.search(r"a chain: \d+ tokens sampled, \d+ with prompts and results, \d\.\d s", "\n".join(describe(look)))


# ---- alarms


def alarmed(given: list[Group], alarms: Alarms) -> list[tuple[int, Finding]]:
    return [(number, one) for number, group in enumerate(given, 1) for one in alarms.note(group)]


SILENT = groups(*[chain(BARE)] * 4 * 40)
CALLING = groups(*[chain("")] * 3, chain("", tool_calls=1))


def test_no_call_in_many_groups_is_told_once() -> None:
    ((number, one),) = alarmed(SILENT, Alarms(offer(), batch_size=2))
    assert number * 4 == ENOUGH_CHAINS
    assert str(one).startswith("no chain of 64 in 16 groups called a tool, though calculate is offered; ")


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ([*SILENT[:15], *CALLING] * 4, offer()),  # a call begins the count again
        (SILENT, offer(specs=())),
        # nor is anything wrong if all succeed without a tool
        (groups(*[chain("3", 1.0, success=1.0)] * 4 * 40), offer()),
        (groups(*[chain("", 1.0, tool_calls=1, success=1.0)] * 4 * 40), offer(equal_rewards="refill")),
    ],
)
def test_no_alarm(given: list[Group], used: Offer) -> None:
    assert alarmed(given, Alarms(used, 2)) == []


@pytest.mark.parametrize(("seconds", "number"), [(1.5, 1), (0.9, 0)])
def test_waits_for_processes_are_told_with_the_setting(seconds: float, number: int) -> None:
    chains = [chain("", tool_calls=1) for _ in range(ENOUGH_CHAINS)]
    for one in chains:
        one.timeline = [Stretch(Activity.WAIT, 0.0, seconds, name="pad")]
    why = {"pad": ("each chain starts a process of its own", "mcp_servers.pad.isolation: shared")}
    used = replace(offer(), why_wait=why)
    assert "waits for pad" not in told(look_at(groups(*chains)[:-1], used))
    given = alarmed(groups(*chains) * 2, Alarms(used, 2))
    assert [str(one) for _, one in given] == [
        "chains spend 75% of their time waiting for a process of tool server pad (1.5 s each): each chain starts a "
        "process of its own; fix: mcp_servers.pad.isolation: shared"
    ] * number


def test_each_source_is_looked_at_once() -> None:
    groups = [Group(f"g{number}", {}, [], source=name) for number, name in enumerate("aabacbcd")]
    first = FirstGroups(3, "abcd")
    taken = [first.take(group) for group in groups]
    assert taken == [[], [], groups[:3], [], [groups[4]], [], [], [groups[7]]]
    assert [FirstGroups(1, ()).take(group) for group in groups] == [[]] * len(groups)
