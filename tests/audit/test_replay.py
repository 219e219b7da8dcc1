"""`agentfactory replay`: the same beginning token by token, changes, the turns that decided, rows of data."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from agentfactory.audit.replay.continuations import (
    ReplayError,
    Results,
    TurnEffect,
    continuations,
    credit,
    preference,
    ranked,
    results_of,
    transcript,
    turn_effects,
)
from agentfactory.audit.replay.prefix import Change
from agentfactory.audit.replay.saved_chain import SavedChain, find_chain
from agentfactory.audit.run_record import records_of
from agentfactory.commands.main import main
from agentfactory.rollout.chains.chain_runner import ChainRunner
from agentfactory.rollout.evaluation.evaluate import open_runner
from agentfactory.rollout.trajectory import Outcome, Trajectory

Found = TypeVar("Found")
MOVE_EAST = {"name": "move", "arguments": {"direction": "east"}}
EAST = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": MOVE_EAST}]}


@pytest.fixture(scope="module")
def saved(quickstart_run: Path) -> SavedChain:
    """A chain of at least four turns."""
    records = records_of(quickstart_run)
    for record in records:
        for seen in record.groups():
            for chain in seen.group.trajectories:
                if chain.turns >= 4 and chain.reward is not None and not chain.malformed_turns and not seen.held_out:
                    return find_chain(records, chain.id)
    raise AssertionError("no chain has four turns")


@pytest.fixture
def on_server(saved: SavedChain, warm_server: str) -> Callable[[Callable[[ChainRunner], Awaitable[Found]]], Found]:

    def call(act: Callable[[ChainRunner], Awaitable[Found]]) -> Found:
        async def opened() -> Found:
            async with open_runner(saved.part.recipe, saved.record.folder, warm_server) as runner:
                return await act(runner)

        return asyncio.run(opened())

    return call


def test_continuations_begin_with_the_saved_tokens_and_states(saved: SavedChain, on_server: Any) -> None:
    chain, turns = saved.chain, 3
    found: Results = on_server(lambda runner: continuations(runner, chain, saved.task, turns, 6, "policy"))
    _, start, _ = chain.turn_spans()[turns]
    assert len(found.chains) == 6
    for one in found.chains:
        for stream in ("token_ids", "mask", "logprobs"):
            mine, theirs = (np.asarray(getattr(row, stream)[:start]) for row in (one.rows[0], chain.rows[0]))
            assert np.array_equal(mine, theirs), stream
        assert one.anchors[: turns + 1] == chain.anchors[: turns + 1]
        labels = {span.version for span in one.rows[0].versions if span.start < start}
        assert labels == {span.version for span in chain.rows[0].versions if span.start < start}
    assert found.interval[0] <= found.mean <= found.interval[1]


def test_an_action_is_inserted_and_acts(saved: SavedChain, on_server: Any) -> None:
    change = Change(actions={1: EAST})
    found: Results = on_server(lambda runner: continuations(runner, saved.chain, saved.task, 2, 2, "policy", change))
    own = [message for message in found.chains[0].messages if message["role"] == "assistant"]
    assert own[1]["tool_calls"][0]["function"] == MOVE_EAST
    row = found.chains[0].rows[0]
    end = row.turn_ends[1]
    first = row.turn_ends[0]
    assert not any(row.mask[first:end])
    assert row.token_ids[:first] == list(saved.chain.rows[0].token_ids[:first])


def test_a_result_is_told_otherwise_but_the_call_is_made(saved: SavedChain, on_server: Any) -> None:
    change = Change(result="The treasure lies west of a lake.")
    found: Results = on_server(lambda runner: continuations(runner, saved.chain, saved.task, 2, 3, "policy", change))
    for one in found.chains:
        results = [message["content"] for message in one.messages if message["role"] == "tool"]
        saved_results = [message["content"] for message in saved.chain.messages if message["role"] == "tool"]
        assert results[0] == saved_results[0]
        assert results[1] == "The treasure lies west of a lake."
        assert one.anchors[2] == saved.chain.anchors[2]


def test_another_system_prompt_is_rendered_again(saved: SavedChain, on_server: Any) -> None:
    change = Change(system="Think.")
    assert not change.is_exact
    found: Results = on_server(lambda runner: continuations(runner, saved.chain, saved.task, 2, 2, "policy", change))
    for one in found.chains:
        assert one.messages[0] == {"role": "system", "content": "Think."}
        said = [message for message in one.messages if message["role"] == "assistant"]
        mine, theirs = said[:2], [message for message in saved.chain.messages if message["role"] == "assistant"][:2]
        assert mine == theirs


def test_a_chain_that_does_something_else_is_refused(saved: SavedChain, on_server: Any) -> None:
    start = saved.task["start"]
    moved = {**saved.task, "start": [start[0] % 7 + 1, start[1]]}
    with pytest.raises(ReplayError, match=r"before turn \d|another state"):
        on_server(lambda runner: continuations(runner, saved.chain, moved, 3, 2, "policy"))
    rows = [replace(row, token_ids=np.array(row.token_ids)) for row in saved.chain.rows]
    rows[0].token_ids[4] += 1
    changed = replace(saved.chain, rows=rows)
    with pytest.raises(ReplayError, match="before turn 1, token 4: "):
        on_server(lambda runner: continuations(runner, changed, saved.task, 2, 2, "policy"))


def test_effects_of_turns_add_up_to_the_outcome(saved: SavedChain, on_server: Any) -> None:
    effects: list[TurnEffect] = on_server(lambda runner: turn_effects(runner, saved.chain, saved.task, 3, "policy"))
    assert [effect.turn for effect in effects] == list(range(1, saved.chain.turns + 1))
    total = sum(effect.effect for effect in effects)
    assert total == pytest.approx(effects[-1].after.mean - effects[0].before.mean)
    assert effects[-1].after.mean == saved.chain.metrics["success"]


def results(mean: float) -> Results:
    return Results([], "success", mean, None)


@pytest.mark.parametrize(
    ("means", "order"),
    [
        # failed, as was expected: what lost most comes first
        ([0.0, 0.5, 0.25, 0.0, 0.0], [2, 3, 4, 1]),
        # lost: what lost most comes first
        ([0.9, 0.9, 0.1, 0.3, 0.0], [2, 4, 1, 3]),
        # won: what gained most comes first
        ([0.1, 0.2, 0.9, 0.8, 1.0], [2, 4, 1, 3]),
    ],
)
def test_turns_are_ranked_by_hand(means: list[float], order: list[int]) -> None:
    effects = [TurnEffect(turn + 1, results(means[turn]), results(means[turn + 1])) for turn in range(4)]
    assert [effect.turn for effect in ranked(effects)] == order


def ended(reward: float | None, *said: str) -> Trajectory:
    opening = [{"role": "user", "content": "go"}]
    messages = [*opening, *({"role": "assistant", "content": text} for text in said)]
    chain = Trajectory("c", messages, [], Outcome.COMPLETED, reward)
    chain.turns = len(said)
    return chain


def test_rows_of_data() -> None:
    saved, good, bad = ended(0.0, "a", "b"), ended(1.0, "a", "c"), ended(0.2, "a", "d")
    row = preference(saved, 1, [bad, good], [])
    assert row["prompt"] == saved.messages[:2]
    assert (row["chosen"], row["rejected"]) == (good.messages[2:], bad.messages[2:])
    assert transcript([bad, good], [])["messages"] == good.messages
    effects = [TurnEffect(1, results(0.5), results(0.75)), TurnEffect(2, results(0.75), results(0.0))]
    assert credit(saved, effects, [])["turn_rewards"] == [0.25, -0.75]
    with pytest.raises(ValueError, match="all continuations have the reward 1"):
        preference(saved, 1, [good, good], [])
    with pytest.raises(ReplayError, match="no continuation has a reward"):
        results_of([ended(None, "a")])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--turn", "0"], "--turn: got 0; fix: use at least 1"),
        (["--result", "x"], "--result: given without a turn; fix: name the turn by --turn"),
        (["--turn", "1", "--result", "x", "--system", "y"], "--system: given with --result; fix: change one thing"),
        (["--turn", "1", "--action", '{"name": 3}'], '--action: got {"name": 3}; fix: write a call as '),
        (["--as", "sft", "--save", "x.jsonl"], "--as: got 'sft' without --turn; fix: use credit"),
        (["--save", "no/such/file.jsonl"], "--save: no/such is not a folder"),
    ],
)
def test_options_are_checked_before_a_server_starts(
    saved: SavedChain, quickstart_run: Path, options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(quickstart_run), saved.chain.id, *options]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.extended
def test_both_have_their_intervals(saved: SavedChain, quickstart_run: Path, tmp_path: Path, agentfactory: Any) -> None:
    call = json.dumps(MOVE_EAST)
    command = ["replay", str(quickstart_run), saved.chain.id, "--turn", "2", "--samples", "8"]
    result = agentfactory(*command, "--action", call, "--json", "--as", "sft", "--save", str(tmp_path / "rows.jsonl"))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert {one["chains"] for one in found["results"].values()} == {8}
    assert json.loads((tmp_path / "rows.jsonl").read_text())["messages"]
    ranking = agentfactory("replay", str(quickstart_run), saved.chain.id, "--samples", "2")
    assert ranking.stdout.count("  turn ") == saved.chain.turns
