"""Credit from rewards to advantages and weights, compared with hand-computed values."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import agentfactory
from agentfactory.rollout.config import OutcomePolicy
from agentfactory.rollout.config.chains import ChainConfig
from agentfactory.rollout.config.sources import TasksConfig
from agentfactory.rollout.inference.weight_versions import WeightVersions
from agentfactory.rollout.token_row import Row, Span
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from agentfactory.trainers.config import ALGORITHMS, TeacherConfig, TrainRecipe
from agentfactory.trainers.loop.token_advantages import Credit, Credited, needed_scores
from tests.trainers.conftest import Make

pytestmark = pytest.mark.numbers

ROOT = Path(agentfactory.__file__).parent


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
        recipe.train.advantage.malformed_turns = "blamed"
        chains["late"].malformed_turns = [0, 1]
        credit = Credit([group(*chains.values())], recipe, fresh)
        bound = -math.sqrt((2 * 1 + 4 * 4) / 6)
        assert advantages(credit.assign(credit.rows)) == [[-1.0] * 2, [bound] * 2 + [2.0] * 2]


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


def test_scaling_by_the_source(make_recipe: Make) -> None:
    """Interleaved sources with rewards 0, 2, 4, 6 and 0, 10, 10, 20: sample standard deviations sqrt(20 / 3) and
    sqrt(200 / 3)."""
    recipe = make_recipe(advantage={"options": {"scale": "batch"}, "per_source": True})
    given = [("small", 0.0, 2.0), ("large", 0.0, 10.0), ("small", 4.0, 6.0), ("large", 10.0, 20.0)]
    groups = [Group("g", {}, [chain(low), chain(high)], source=name) for name, low, high in given]
    small, large = 1.0 / ((20 / 3) ** 0.5 + 1e-4), 5.0 / ((200 / 3) ** 0.5 + 1e-4)
    found = [row.streams["advantage"][0] for row in credited(recipe, *groups).rows]
    assert found == pytest.approx([-small, small, -large, large, -small, small, -large, large])


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


RECIPES_OWN = {
    # sft has no sources
    ("launching/trainer_main.py", "parser"): "sft",
    ("launching/trainer_main.py", "reasoning"): "sft",
    ("launching/trainer_main.py", "coordinates"): "sft",
    # no source may have more
    **dict.fromkeys((f"placement/{name}.py", "max_total_tokens") for name in ("plan_choice", "suggested_changes")),
    **dict.fromkeys((f"placement/{name}_memory.py", "max_total_tokens") for name in ("activation", "server")),
    ("trainers/networks/network.py", "max_total_tokens"): "no source may have more",
    ("launching/trainer_main.py", "max_total_tokens"): "contexts of the canary",
    ("trainers/loop/token_advantages.py", "max_total_tokens"): "groups of no source",
}
"""Places that read a setting of chains from the whole recipe, though a source may have its own."""


def test_settings_that_a_source_may_have_are_read_from_its_part() -> None:
    """Over the schema: whatever trains, plans memory or runs the worker takes each of these from a part of the recipe,
    or is listed with the reason."""
    names = "|".join(sorted(ChainConfig.model_fields))
    found = set()
    for package in ("trainers", "placement", "launching", "rollout/workers", "rollout/groups"):
        for file in (ROOT / package).rglob("*.py"):
            code = re.sub(r'""".*?"""|"[^"\n]*"', "", file.read_text(), flags=re.DOTALL)
            for name in re.findall(rf"recipe\.rollout\.({names})\b", code):
                found.add((str(file.relative_to(ROOT)), name))
    assert found <= RECIPES_OWN.keys()
    assert ("placement/activation_memory.py", "max_total_tokens") in found


def test_each_source_is_whitened_alone_and_keeps_its_returns(make_recipe: Make) -> None:
    """As if each had a batch of its own, from an independent call for each."""
    recipe = make_recipe(algorithm="ppo", advantage={"per_source": True})
    values = {"a": [0.1, 0.2, 0.3], "b": [0.5, 0.7, 0.9]}
    groups = {
        "a": Group("g0", {}, [chain(1.0), chain(0.0)], source="a"),
        "b": Group("g1", {}, [chain(9.0), chain(-3.0)], source="b"),
    }
    scores = {name: [{"value": value}] * 2 for name, value in values.items()}
    done = credited(recipe, *groups.values(), scores=[*scores["a"], *scores["b"]])
    alone = [row for name in groups for row in credited(recipe, groups[name], scores=scores[name]).rows]
    for row, expected in zip(done.rows, alone, strict=True):
        assert row.streams["advantage"] == pytest.approx(expected.streams["advantage"])
        assert row.streams["return"] == pytest.approx(expected.streams["return"])


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


# raft has no advantage below 0, except for malformed turns: see the next test
@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS.keys() - {"sft", "distill", "raft"}))
def test_every_algorithm_blames_a_turn_that_cannot_be_read(make_recipe: Make, algorithm: str) -> None:
    groups = [group(malformed(5.0, 1), malformed(1.0, 0), chain(0.0), chain(4.0))]
    for rule in ("blamed", "like_others"):
        recipe = make_recipe(algorithm=algorithm, advantage={"malformed_turns": rule})
        scores = [{name: [0.0] * 3 for name in needed_scores(recipe)}] * 4
        best, worse, *others = (row.streams["advantage"] for row in credited(recipe, *groups, scores=scores).rows)
        assert best[0] > 0
        assert worse[0] < 0
        assert best[2] < 0 if rule == "blamed" else best[2] > 0
        assert others[1][0] > 0


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
    assert [row.streams["return"] for row in done.rows] == [
        pytest.approx([0.5, 0.5, 1.0]),
        pytest.approx([0.5, 0.5, 0.5]),
    ]
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


def test_what_is_kept_of_the_credit(make_recipe: Make) -> None:
    """Rows and positions are the trajectory's, and a group without a learning signal has a line, too."""
    recipe = make_recipe(advantage={"options": {"scale": "none"}})
    split = replace(chain(1.0, turns=(2,)), id="split")
    unsampled = Row()
    unsampled.append_context([1, 2])
    split.rows = [*split.rows, unsampled, *chain(1.0, turns=(1, 1)).rows]
    broken = replace(chain(None, outcome=Outcome.TIMEOUT), id="broken")
    credit = Credit([group(split, chain(0.0)), Group("none", {}, [broken])], recipe)
    rows = credit.assign(credit.rows).rows
    proximal = list(map(np.array, ([-0.1234567, -2.0], [-3.0, -4.0], [-5.0, -6.0, -7.0])))
    before = [{"proximal": values, "divergence": np.full(len(values), np.nan)} for values in proximal]
    before[0]["divergence"] = np.array([0.25, np.nan])
    first, second = map(json.loads, credit.lines(7, rows, before))
    # a row of which the teacher graded no token has no divergence
    assert first["chains"]["split"][0].pop("divergence") == [0.25, None]
    assert first == {
        "group": "g",
        "step": 7,
        "chains": {
            "split": [
                {"row": 0, "targets": [3, 4], "advantage": [0.5, 0.5], "proximal": [-0.123457, -2.0]},
                {"row": 2, "targets": [3, 6], "advantage": [0.5, 0.5], "proximal": [-3.0, -4.0]},
            ],
            "c": [{"row": 0, "targets": [3, 4, 7], "advantage": [-0.5] * 3, "proximal": [-5.0, -6.0, -7.0]}],
        },
    }
    assert second == {"group": "none", "step": 7, "chains": {}}
    # steps that train only the critic compute no log-probabilities
    assert "proximal" not in json.loads(credit.lines(7, rows)[0])["chains"]["c"][0]


def test_a_turn_that_begins_a_row_shifts_no_reward(make_recipe: Make) -> None:
    """The first token of a row has no context, so it is not trained: the turn's reward is for the others."""

    def headless(reward: float, turn_rewards: list[float]) -> Trajectory:
        row = Row()
        row.append_sampled([4] * 3, [-1.0] * 3, [Span("0", 0, 3)])
        row.append_context([7, 7])
        row.append_sampled([4] * 2, [-1.0] * 2, [Span("0", 5, 7)])
        made = Trajectory("c", [], [row], Outcome.COMPLETED, reward, turns=2)
        made.turn_rewards = turn_rewards
        return made

    recipe, rewards = make_recipe(advantage={"options": {"scale": "none"}}), ([1.0, 0.0], [0.0, 0.0])
    plain = group(*(with_rewards(chain(0.0, (2, 2)), turn) for turn in rewards))
    found, expected = credited(recipe, group(*(headless(0.0, turn) for turn in rewards))), credited(recipe, plain)
    assert advantages(found) == [row.streams["advantage"].tolist() for row in expected.rows]


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
