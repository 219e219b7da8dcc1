"""Credit by state (gigpo): hand-computed values, the full definition, and the criteria for the same state."""

import logging
import random
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentfactory.rollout.config import OutcomePolicy
from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from agentfactory.tools.environments.environment import anchor_text
from agentfactory.trainers.config import AdvantageConfig, TrainRecipe
from agentfactory.trainers.loop.advantages import ChainRewards, Estimator, gigpo, returns, step_advantages
from agentfactory.trainers.loop.token_advantages import Credit, observations
from tests.trainers.conftest import Make

pytestmark = pytest.mark.numbers


def test_lone_anchors_and_equal_returns_are_exactly_zero() -> None:
    assert step_advantages([[0.1, 0.1], [0.1]], [["a", "a"], ["a"]]) == [[0.0, 0.0], [0.0]]
    assert step_advantages([], []) == []
    with pytest.raises(ValueError, match="each turn needs a return and an anchor"):
        step_advantages([[1.0]], [["a", "b"]])


def test_both_levels_by_hand() -> None:
    """Two chains, gamma 1/2. Chain one: turns of 2 and 1 tokens, reward 1 at its end, so returns 1/2 and 1. Chain two:
    turns of 1 and 1 tokens, reward 0 and turn rewards 0 and 2, so returns 1 and 2, and 2 in all. Both begin in state s,
    then diverge."""
    first = ChainRewards(1.0, [], [2, 3], [0.0, 0.0, 1.0], anchors=["s", "left"])
    second = ChainRewards(0.0, [0.0, 2.0], [1, 2], [0.0, 2.0], anchors=["s", "right"])
    # chains: 1 and 2, mean 1.5; state s: 1/2 and 1, mean 3/4
    assert gigpo([[first, second]], "none", 0.5) == [[-0.75, -0.75, -0.5], [0.75, 0.5]]
    # the same anchor in two groups is a state of two different tasks
    groups = [[ChainRewards(reward, [], [1], [reward], anchors=["s"])] for reward in (1.0, 0.0)]
    assert gigpo(groups, "none", 1.0) == [[0.0], [0.0]]
    config = AdvantageConfig(estimator="gigpo", options={"scale": "none", "gamma": 0.5})
    assert Estimator(config)([[first, second]]) == ([[-0.75, -0.75, -0.5], [0.75, 0.5]], [])


CHAINS = st.lists(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.floats(-2, 2)), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


@given(chains=CHAINS, scale=st.sampled_from(["none", "group"]), gamma=st.floats(0, 1))
def test_the_definition_written_out(chains: list[list[tuple[str | None, float]]], scale: Any, gamma: float) -> None:
    """Each turn: the sum of gamma^(k - t) r_k, against all turns of the group with its anchor; over each anchor the
    advantages sum to 0."""
    rewards = [[reward for _, reward in chain] for chain in chains]
    anchors = [[anchor for anchor, _ in chain] for chain in chains]
    later = [[sum(gamma ** (k - t) * one[k] for k in range(t, len(one))) for t in range(len(one))] for one in rewards]
    found = step_advantages([returns(chain, gamma) for chain in rewards], anchors, scale)
    pooled: dict[str, list[float]] = {}
    for i, chain in enumerate(anchors):
        for t, anchor in enumerate(chain):
            same = [later[j][k] for j, group in enumerate(anchors) for k, other in enumerate(group) if other == anchor]
            if anchor is None or len(same) == 1:
                assert found[i][t] == 0.0
                continue
            scaling = 1.0 if scale == "none" else stdev(same) + 1e-4
            # returns that differ only by rounding are divided by at least 1e-4
            assert found[i][t] == pytest.approx((later[i][t] - fmean(same)) / scaling, abs=1e-9)
            pooled.setdefault(anchor, []).append(found[i][t])
    assert all(sum(values) == pytest.approx(0.0, abs=1e-9) for values in pooled.values())


def played(
    reward: float, anchors: list[str | None], tokens: int = 1, outcome: Outcome = Outcome.COMPLETED
) -> Trajectory:
    """Return a chain with one turn per anchor, each with `tokens` tokens and followed by a tool result."""
    row = Row()
    row.append_context([1, 2])
    for _ in anchors:
        row.append_sampled([4] * tokens, [-1.0] * tokens, [Span("0", 0, tokens)])
        row.append_context([7])
    return Trajectory("c", [], [row], outcome, reward, turns=len(anchors), anchors=list(anchors))


def credited(recipe: TrainRecipe, *chains: Trajectory) -> tuple[list[list[float]], dict[str, float]]:
    credit = Credit([Group("g", {}, list(chains))], recipe)
    done = credit.assign(credit.rows)
    return [row.streams["advantage"].tolist() for row in done.rows], done.metrics


def test_the_state_decides_between_equal_chains(make_recipe: Make) -> None:
    """Both chains succeed, the second by a detour from state a over b, back to a: grpo gives all turns the same
    advantage, gigpo prefers the turn that leads from a to the goal."""
    quick, detour = played(1.0, ["a", None]), played(1.0, ["a", "b", "a", None])
    assert credited(make_recipe(), quick, detour)[0] == [[0.0] * 2, [0.0] * 4]
    recipe = make_recipe(algorithm="gigpo", advantage={"options": {"scale": "none"}})
    advantages, metrics = credited(recipe, quick, detour)
    # returns at a: .95, .95^3, .95
    at_a = [0.95, 0.95**3, 0.95]
    mean = fmean(at_a)
    assert advantages[0] == pytest.approx([0.95 - mean, 0.0])
    assert advantages[1] == pytest.approx([0.95**3 - mean, 0.0, 0.95 - mean, 0.0])
    assert metrics == {"step_groups/turns": 0.5, "step_groups/size": 3.0}


def test_a_chain_in_several_rows_is_credited_turn_by_turn(make_recipe: Make) -> None:
    recipe = make_recipe(algorithm="gigpo", advantage={"options": {"scale": "none", "gamma": 1.0}})
    whole = [played(1.0, ["a", "b"], tokens=2), played(0.0, ["a", "b"], tokens=2)]
    split = played(1.0, ["a"], tokens=2)
    split.rows += played(1.0, ["b"], tokens=2).rows
    split.turns, split.anchors = 2, ["a", "b"]
    flat = [value for row in credited(recipe, *whole)[0] for value in row]
    assert [value for row in credited(recipe, split, whole[1])[0] for value in row] == flat == [1.0] * 4 + [-1.0] * 4


def test_a_masked_chain_counts_and_is_not_trained(make_recipe: Make) -> None:
    recipe = make_recipe(algorithm="gigpo", advantage={"options": {"scale": "none", "gamma": 1.0}})
    recipe.rollout.on_outcome = {Outcome.MAX_TURNS: OutcomePolicy.MASK}
    chains = [played(1.0, ["a"]), played(0.0, ["a"], outcome=Outcome.MAX_TURNS)]
    # half from the chains, half from the turns
    assert credited(recipe, *chains) == ([[1.0]], {"step_groups/turns": 1.0, "step_groups/size": 2.0})


def test_chains_without_anchors_get_the_chains_part(make_recipe: Make, caplog: pytest.LogCaptureFixture) -> None:
    recipe = make_recipe(algorithm="gigpo", advantage={"options": {"scale": "none"}})
    mixed = [played(1.0, ["a"]), played(0.0, [None])]
    mixed[1].anchors = []
    with caplog.at_level(logging.WARNING):
        assert credited(recipe, *mixed) == ([[0.5], [-0.5]], {"step_groups/turns": 0.0})
        assert not caplog.records
        mixed[0].anchors = []
        assert credited(recipe, *mixed)[0] == [[0.5], [-0.5]]
    assert "no turn of a batch has an anchor" in caplog.text


def said(*messages: tuple[str, Any]) -> Trajectory:
    turns = sum(role == "assistant" for role, _ in messages)
    listed = [{"role": role, "content": content} for role, content in messages]
    return Trajectory("c", listed, [], Outcome.COMPLETED, 1.0, turns=turns)


def test_what_was_seen_is_an_anchor_if_the_environment_gives_none() -> None:
    chain = said(("user", "go"), ("assistant", "x"), ("tool", "a wall"), ("assistant", "y"), ("tool", "a wall"))
    chain.messages.append({"role": "assistant", "content": "z"})
    chain.turns = 3
    first, second, third = observations(chain)
    assert first not in (second, None)
    assert second == third
    image = said(("user", [{"type": "image_url", "image_url": {"url": "image:abc"}}]), ("assistant", "x"))
    other = said(("user", [{"type": "image_url", "image_url": {"url": "image:abd"}}]), ("assistant", "x"))
    assert observations(image) != observations(other)


def test_a_complaint_is_no_state() -> None:
    chain = said(
        ("user", "go"), ("assistant", "x"), ("tool", "a wall"), ("assistant", "<tool"), ("user", "not JSON"),
        ("assistant", "y"), ("assistant", "after a summary"),
    )  # fmt: skip
    chain.malformed_turns = [1]
    _, before, after, nothing = observations(chain)
    assert before == after
    assert nothing is None


def test_messages_of_the_task_are_no_turns() -> None:
    chain = said(("user", "2 + 2?"), ("assistant", "4"), ("user", "3 + 3?"), ("assistant", "6"))
    chain.turns = 1
    (anchor,) = observations(chain)
    assert anchor is not None
    assert len(observations(Trajectory("c", [], [], Outcome.TIMEOUT))) == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, None),
        ("kitchen", "kitchen"),
        ((1, 2), "[1, 2]"),
        ({"b": 1, "a": [True, None]}, '{"a": [true, null], "b": 1}'),
        ("\ud800", "?"),
    ],
)
def test_anchors_as_text(value: Any, text: str | None) -> None:
    assert anchor_text(value) == text
    assert anchor_text(anchor_text(value)) == text


def test_long_anchors_become_digests_and_sets_are_refused() -> None:
    rng = random.Random(0)
    pages = ["".join(rng.choices("ab", k=200)) for _ in range(100)]
    digests = {anchor_text(page) for page in pages}
    assert len(digests) == 100
    assert {len(digest or "") for digest in digests} == {32}
    assert anchor_text(anchor_text(pages[0])) == anchor_text(pages[0])
    with pytest.raises(TypeError, match="JSON cannot hold a set"):
        anchor_text({"a", "b"})
