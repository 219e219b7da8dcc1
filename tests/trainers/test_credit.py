"""Credit from rewards to advantages and weights, compared with hand-computed values."""

import json
import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from agentfactory.rollout.config import OutcomePolicy
from agentfactory.rollout.config.sources import TasksConfig
from agentfactory.rollout.inference.weight_versions import WeightVersions
from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from agentfactory.trainers.config import TeacherConfig, TrainRecipe
from agentfactory.trainers.loop.token_advantages import Credit, Credited, needed_scores
from tests.trainers.conftest import Make

pytestmark = pytest.mark.numbers


def chain(reward: float | None, turns: Sequence[int] = (2, 1), outcome: Outcome = Outcome.COMPLETED) -> Trajectory:
    """Return a chain: a prompt of 3 tokens, then the sampled tokens of `turns`, with 2 tool tokens between."""
    row = Row()
    row.append_context([1, 2, 3])
    for index, count in enumerate(turns):
        if index:
            row.append_context([7, 7])
        row.append_sampled([4] * count, [-1.0] * count, [Span("0", 0, count)])
    return Trajectory("c", [], [row], outcome, reward, turns=len(turns))


def group(*chains: Trajectory) -> Group:
    return Group("g", {}, list(chains))


def advantages(credited: Credited) -> list[list[float]]:
    return [pytest.approx(row.streams["advantage"]) for row in credited.rows]


def credited(recipe: TrainRecipe, *groups: Group, scores: Sequence[dict[str, list[float]]] = ()) -> Credited:
    """Return the credit of `groups`; `scores` are the streams that the learner would add to each row."""
    credit = Credit(groups, recipe)
    rows = credit.rows
    for row, found in zip(rows, scores, strict=True) if scores else ():
        row.streams.update({name: np.array(values) for name, values in found.items()})
    return credit.assign(rows)


def test_a_chain_that_broke_is_neither_trained_nor_in_the_baseline(make_recipe: Make) -> None:
    recipe = make_recipe(advantage={"options": {"scale": "none"}})
    broken = chain(90.0, outcome=Outcome.TIMEOUT)
    groups = group(chain(1.0), chain(2.0), broken, chain(None))
    assert advantages(credited(recipe, groups)) == [[-0.5] * 3, [0.5] * 3]

    recipe.rollout.on_outcome = {Outcome.TIMEOUT: OutcomePolicy.KEEP}
    assert advantages(credited(recipe, groups)) == [[-30.0] * 3, [-29.0] * 3, [59.0] * 3]

    recipe.rollout.on_outcome = {Outcome.TIMEOUT: OutcomePolicy.MASK}
    done = credited(recipe, groups)
    assert advantages(done) == [[-30.0] * 3, [-29.0] * 3]
    assert done.normaliser == 6


def test_what_was_put_into_a_turn_is_credited_with_nothing(make_recipe: Make) -> None:
    """Turn of 2 and 3 sampled tokens; forced tokens before, within and between them do not change any sampled token's
    credit."""

    def forced(reward: float, *turns: list[int]) -> Trajectory:
        row = Row()
        for mask in turns:
            row.append_context([7])
            row.append_sampled([4] * len(mask), [-1.0] * len(mask), [], mask)
        return Trajectory("c", [], [row], Outcome.COMPLETED, reward, turns=len(turns))

    streams = []
    for pair in (
        [forced(1.0, [1, 1], [1, 1, 1]), forced(0.0, [1, 1], [1, 1, 1])],
        [forced(1.0, [0, 1, 0, 1], [0, 0, 1, 1, 1]), forced(0.0, [1, 0, 0, 1], [1, 1, 0, 1])],
    ):
        pair[0].turn_rewards, pair[1].turn_rewards = [1.0, 2.0], [0.0, 4.0]
        streams.append([row.streams["advantage"].tolist() for row in credited(make_recipe(), group(*pair)).rows])
    plain, with_forced = streams
    assert with_forced == plain
    assert [len(values) for values in plain] == [5, 5]
    assert plain[0][1] != plain[0][2], "turns differ"


def of_turns(reward: float, *versions: str) -> Trajectory:
    made = chain(reward, [2] * len(versions))
    for span, version in zip(made.rows[0].versions, versions, strict=True):
        span.version = version
    return made


@pytest.mark.parametrize(
    ("late", "trained", "total"),
    [
        # the mean of 0, 0 and 3 is 1
        ("wait", {"fast": [-1.0] * 2, "slow": [-1.0] * 4, "late": [2.0] * 6}, 12.0),
        ("baseline", {"slow": [-1.0] * 2, "late": [2.0] * 4}, 6.0),
        # the mean of 0 and 1; the chain that would have earned 3 is not known
        ("drop", {"fast": [-0.5] * 2, "slow": [0.5] * 4}, 6.0),
    ],
)
def test_a_group_with_a_late_chain(make_recipe: Make, late: str, trained: dict[str, list[float]], total: float) -> None:
    """Version 2 trains a group that began at version 0, and no token may be older than one update. At its last chance,
    version 1, its late chain still ran."""
    recipe = make_recipe(advantage={"options": {"scale": "none"}}, loss={"normaliser": "token"})
    second = 1.0 if late == "drop" else 0.0
    chains = {"fast": of_turns(0.0, "0"), "slow": of_turns(second, "0", "1"), "late": of_turns(3.0, "0", "1", "2")}
    if late == "drop":
        chains["late"].outcome, chains["late"].reward = Outcome.CANCELLED, None
    for name, made in chains.items():
        made.id = name
    versions = WeightVersions({"0": 0, "1": 1, "2": 2})
    fresh = partial(versions.fresh, version=2, most=1) if late == "baseline" else None
    credit = Credit([group(*chains.values())], recipe, fresh)
    done = credit.assign(credit.rows)
    (line,) = map(json.loads, credit.lines(1, done.rows))
    assert {name: rows[0]["advantage"] for name, rows in line["chains"].items()} == trained
    assert done.normaliser == total
    if late == "baseline":
        assert [row.targets.tolist() for row in done.rows] == [[7, 8], [7, 8, 11, 12]]
        assert [len(row.token_ids) for row in done.rows] == [9, 13], "older tokens are context"


def test_rewards_of_turns_that_are_too_old_are_not_credited_to_later_ones(make_recipe: Make) -> None:
    """Turn rewards 1, 3 and 2, 2 have mean 2 and sample deviation sqrt(2/3); the first turns are not trained."""
    first, second = (with_rewards(of_turns(1.0, "0", "1"), rewards) for rewards in ([1.0, 3.0], [2.0, 2.0]))
    fresh = partial(WeightVersions({"0": 0, "1": 1}).fresh, version=2, most=1)
    credit = Credit([group(first, second)], make_recipe(), fresh)
    unit = 1.0 / ((2 / 3) ** 0.5 + 1e-4)
    assert advantages(credit.assign(credit.rows)) == [[unit] * 2, [0.0] * 2]


def test_rows_of_a_chain_that_forked_count_once_in_the_baseline(make_recipe: Make) -> None:
    forked = chain(1.0)
    forked.rows += chain(1.0, [4]).rows
    done = credited(make_recipe(advantage={"options": {"scale": "none"}}), group(forked, chain(0.0)))
    assert advantages(done) == [[0.5] * 3, [0.5] * 4, [-0.5] * 3]


def test_each_source_has_its_own_limit_of_length(make_recipe: Make) -> None:
    """Chains of 15 tokens after a prompt of 3, and a buffer of 10: 8 into it for a limit of 20, none of it for 40."""
    unscaled, constant = {"options": {"scale": "none"}}, {"normaliser": "constant"}
    recipe = make_recipe(overlong={"buffer": 10}, advantage=unscaled, loss=constant)
    recipe.rollout.max_total_tokens = 40
    sources = [{"name": "short", "path": "a.jsonl", "max_total_tokens": 20}, {"name": "long", "path": "b.jsonl"}]
    recipe = recipe.model_copy(update={"data": TasksConfig.model_validate({"sources": sources})})
    groups = [Group("g", {}, [chain(1.0, [15]), chain(1.0, [2])], source=name) for name in ("short", "long")]
    done = credited(recipe, *groups)
    assert advantages(done) == [[-0.4] * 15, [0.4] * 2, [0.0] * 15, [0.0] * 2]
    # a chain of 15 tokens and one of 2, each divided by its limit; mean over the chains
    total = sum(row.streams["weight"].sum() for row in done.rows)
    assert total / done.normaliser == pytest.approx((15 / 20 + 2 / 20 + 15 / 40 + 2 / 40) / 4)


def test_turn_rewards_reach_the_tokens_of_their_turn_and_before(make_recipe: Make) -> None:
    """DeepSeekMath 4.1.3: turn rewards 1, 3 and 2, 2 have mean 2 and sample deviation sqrt(2/3); a token gets the sum
    of the normalised rewards of its own and later turns, plus the chain's advantage, which is 0 here."""
    done = credited(make_recipe(), group(*(with_rewards(chain(1.0), rewards) for rewards in ([1.0, 3.0], [2.0, 2.0]))))
    unit = 1.0 / ((2 / 3) ** 0.5 + 1e-4)
    assert advantages(done) == [[0.0, 0.0, unit], [0.0, 0.0, 0.0]]


def malformed(reward: float, *turns: int) -> Trajectory:
    made = chain(reward)
    made.malformed_turns = list(turns)
    return made


def test_a_turn_that_cannot_be_read_is_blamed(make_recipe: Make) -> None:
    groups = group(malformed(3.0, 0), malformed(1.0, 1), chain(2.0))
    recipe = make_recipe(advantage={"options": {"scale": "none"}})
    # the group's advantages are 1, -1 and 0, for 3 tokens each
    bound = -math.sqrt(2 / 3)
    assert advantages(credited(recipe, groups)) == [[bound, bound, 1.0], [-1.0] * 3, [0.0] * 3]
    recipe = make_recipe(advantage={"options": {"scale": "none"}, "malformed_turns": "like_others"})
    assert advantages(credited(recipe, groups)) == [[1.0] * 3, [-1.0] * 3, [0.0] * 3]
    # without a learning signal, nothing is penalised
    assert advantages(credited(make_recipe(), group(malformed(1.0, 0), chain(1.0)))) == [[0.0] * 3] * 2


def test_rejection_sampling_imitates_whole_chains_without_their_malformed_turns(make_recipe: Make) -> None:
    """The best chains are those with the highest sum of rewards; their turn rewards select them, and no turn."""
    pairs = (malformed(1.0, 1), [0.0, 2.0]), (chain(0.0), [4.0, -4.0]), (chain(3.0), [0.0, 0.0])
    groups = group(*(with_rewards(*pair) for pair in pairs))
    recipe = make_recipe(algorithm="raft", advantage={"malformed_turns": "like_others"})
    assert advantages(credited(recipe, groups)) == [[1.0] * 3, [0.0] * 3, [1.0] * 3]
    bound = -math.sqrt(2 / 3)
    assert advantages(credited(make_recipe(algorithm="raft"), groups)) == [[1.0, 1.0, bound], [0.0] * 3, [1.0] * 3]


def test_the_distance_to_the_reference_is_paid_per_token(make_recipe: Make) -> None:
    """k1 = proximal - reference = 0.1 per token; coefficient 1: the returns of a chain of 3 with reward 1 are
    1 - 0.3, 1 - 0.2, 1 - 0.1."""
    cost = {"coefficient": 1.0, "estimator": "k1", "place": "reward"}
    recipe = make_recipe(algorithm="reinforce_pp", loss={"kl": cost})
    assert needed_scores(recipe) == ["reference", "proximal"]
    scores = [{"proximal": [-1.0] * 3, "reference": [-1.1] * 3}] * 2
    done = credited(recipe, group(chain(1.0), chain(0.0)), scores=scores)
    flat = [value for row in done.rows for value in row.streams["advantage"]]
    assert flat[1] - flat[0] == pytest.approx(flat[2] - flat[1], rel=1e-4)
    assert (flat[0] - flat[3]) / (flat[1] - flat[0]) == pytest.approx(10.0, rel=1e-4)
    assert done.metrics == {"kl": pytest.approx(0.1, abs=1e-6)}


def test_generalised_advantages_step_over_tool_tokens(make_recipe: Make) -> None:
    """Values 0.5 at each of 3 sampled tokens, reward 1, gamma 1, lambda 0: only the last step has a TD error, of 0.5,
    although two tool tokens precede it."""
    recipe = make_recipe(algorithm="ppo", advantage={"options": {"gae_lambda": 0.0}})
    done = credited(recipe, group(chain(1.0), chain(0.5)), scores=[{"value": [0.5] * 3}] * 2)
    flat = [value for row in done.rows for value in row.streams["advantage"]]
    raw = [0.0, 0.0, 0.5, 0.0, 0.0, 0.0]
    assert [value > 1.0 for value in flat] == [value > 0.1 for value in raw]
    assert [r.streams["return"] for r in done.rows] == [pytest.approx([0.5, 0.5, 1.0]), pytest.approx([0.5, 0.5, 0.5])]
    assert done.metrics["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)


def test_turn_rewards_are_paid_at_the_last_token_of_their_turn(make_recipe: Make) -> None:
    """With values of 0 and lambda 0, a token's return is the reward that is paid at it: the turns have 2 tokens and 1,
    and the chain's reward of 1 is paid at the last."""
    recipe = make_recipe(algorithm="ppo", advantage={"options": {"gae_lambda": 0.0}})
    pair = with_rewards(chain(1.0), [2.0, 0.5]), with_rewards(chain(0.0), [0.0, 4.0])
    done = credited(recipe, group(*pair), scores=[{"value": [0.0] * 3}] * 2)
    returns = [pytest.approx(row.streams["return"]) for row in done.rows]
    assert returns == [[0.0, 2.0, 1.5], [0.0, 0.0, 4.0]]


def test_only_uncertain_tokens_are_trained(make_recipe: Make) -> None:
    recipe = make_recipe(loss={"top_entropy": 0.5}, advantage={"options": {"scale": "none"}})
    scores = [{"entropy": [0.1, 0.9, 0.2]}, {"entropy": [0.8, 0.7, 0.3]}]
    done = credited(recipe, group(chain(1.0), chain(0.0)), scores=scores)
    assert advantages(done) == [[0.0, 0.5, 0.0], [-0.5, -0.5, 0.0]]


def test_a_sampled_teacher_is_bounded_by_the_rules_of_credit(make_recipe: Make) -> None:
    """`least` and `most` are what update_policy bounds the difference by; see test_teachers."""
    groups = group(malformed(3.0, 0), malformed(1.0, 1), chain(2.0))
    recipe = make_recipe(advantage={"options": {"scale": "none"}})
    recipe.teacher = TeacherConfig(model="teacher")
    done = credited(recipe, groups)
    bound, free = -math.sqrt(2 / 3), math.inf
    most = [[bound, bound, free], [free, free, bound], [free] * 3]
    assert [row.streams["most"].tolist() for row in done.rows] == [pytest.approx(values) for values in most]
    assert all((row.streams["least"] == -free).all() for row in done.rows)

    recipe.train.loss.top_entropy = 2 / 9
    scores = [{"entropy": [0.1, 0.9, 0.2]}, {"entropy": [0.8, 0.1, 0.3]}, {"entropy": [0.1, 0.1, 0.1]}]
    done = credited(recipe, groups, scores=scores)
    bounds = [[(0, 0), (-free, bound), (0, 0)], [(-free, free), (0, 0), (0, 0)], [(0, 0)] * 3]
    for row, expected in zip(done.rows, bounds, strict=True):
        told = zip(row.streams["least"].tolist(), row.streams["most"].tolist(), strict=True)
        assert list(told) == [pytest.approx(pair) for pair in expected]

    # without a rule that bounds, and with a divergence that is no advantage
    without = recipe.model_copy(update={"train": make_recipe().train})
    assert "most" not in credited(without, group(chain(1.0))).rows[0].streams
    recipe.teacher = TeacherConfig(model="teacher", divergence="reverse_kl")
    assert "most" not in credited(recipe, groups, scores=scores).rows[0].streams


def with_rewards(trajectory: Trajectory, turn_rewards: list[float]) -> Trajectory:
    trajectory.turn_rewards = turn_rewards
    return trajectory


@pytest.mark.parametrize("noise", [0.0, 1e-6, -1e-6])
def test_equal_entropies_at_the_quantile_are_told_apart_by_their_place(make_recipe: Make, noise: float) -> None:
    """The first tokens of a group's chains are equal except for rounding, which depends on the batching."""
    recipe = make_recipe(loss={"top_entropy": 0.5}, advantage={"options": {"scale": "none"}})
    chains = [chain(reward, (3,)) for reward in (1.0, 0.0, 0.0, 0.0)]
    scores = [{"entropy": [1.0 + noise * sign, 0.1, 2.0 if sign > 0 else 0.2]} for sign in (1, -1, 2, -2)]
    for share, expected in (
        # 6 of 12: two of entropy 2, and of the four of entropy 1 all, whatever the noise
        (0.5, [[1, 0, 1], [1, 0, 0], [1, 0, 1], [1, 0, 0]]),
        # 3 of 12: two of entropy 2, and the first of entropy 1
        (0.25, [[1, 0, 1], [0] * 3, [0, 0, 1], [0] * 3]),
    ):
        recipe.train.loss.top_entropy = share
        rows = credited(recipe, group(*chains), scores=scores).rows
        assert [[int(value != 0.0) for value in row.streams["advantage"]] for row in rows] == expected
