"""The reward `rubric`: scores, rubrics of rows, turns, panels, cache and budget."""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import EnvironmentReward
from agentfactory.people.judges import client, store
from agentfactory.rollout.config import RewardConfig
from agentfactory.rollout.rewards import RewardError, Rewards
from tests.people.judges.conftest import JudgeServer, verdict_of
from tests.rollout.test_reward_library import load, said

CRITERIA = [
    {"text": "Is it right?", "weight": 3, "name": "right"},
    {"text": "How short is it?", "scale": [1, 5]},
    {"text": "Does it flatter?", "weight": -2},
]


async def rate(text: str = "four", row: dict[str, Any] | None = None, **options: Any) -> EnvironmentReward:
    async with load("rubric", **{"model": "m", "criteria": CRITERIA, **options}) as rewards:
        return await rewards.score(said(text), row or {}, None)


async def test_scores_are_weighted(judge: JudgeServer) -> None:
    judge.answer = lambda prompt: f"So:\n```json\n{verdict_of(prompt, '**Yes.**', 2, False)}\n```\nThat is all."
    scored = await rate(url=judge.url)
    assert scored.reward == pytest.approx((3 + 0.25 - 0) / 4)
    own = {"right": 1.0, "criterion_2": 0.25, "criterion_3": 0.0, "judges": 1.0, "cached": 0.0, "spread": 0.0}
    assert scored.metrics == {f"rubric/{name}": value for name, value in own.items()}
    judge.answer = lambda prompt: verdict_of(prompt, "NO", "5", True)
    assert (await rate(url=judge.url)).reward == pytest.approx((0 + 1 - 2) / 4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("yes", 6, "no"), "the judge gave '6' on 'How short is it[?]', which is not a number from 1 to 5"),
        (("yes", "NaN", "no"), "the judge gave 'nan'"),
        (("maybe", 2, "no"), "the judge gave 'maybe' on 'Is it right[?]', which is not yes or no"),
        (("yes", 2), ".* and the criteria are 1, 2, 3"),
        ((["yes"], 2, "no"), ".*which is not yes or no"),
    ],
)
async def test_a_verdict_that_is_not_valid_is_asked_for_once_more(
    judge: JudgeServer, values: tuple[Any, ...], message: str
) -> None:
    judge.answer = lambda prompt: verdict_of(prompt, *values)
    with pytest.raises(RewardError, match=f"rubric: {message}"):
        await rate(url=judge.url)
    assert len(judge.requests) == 2
    judge.answer = lambda prompt: verdict_of(prompt, "yes", 5, "no") if "Write nothing but" in prompt else "Yes."
    assert (await rate(url=judge.url)).reward == 1.0


async def test_a_row_can_bring_its_rubric(judge: JudgeServer) -> None:
    judge.answer = lambda prompt: verdict_of(prompt, *["yes"] * prompt.count("(yes or no)"))
    for given in (["Is it kind?"], "Is it kind?", '["Is it kind?"]', [{"text": "Is it kind?", "weight": 9}]):
        scored = await rate(row={"rubric": given}, url=judge.url, criteria_field="rubric")
        assert scored.reward == 1.0
        assert "rubric/right" not in scored.metrics
        assert "| 1. Is it kind? (yes or no)\n>>> criteria" in judge.requests[-1]["messages"][-1]["content"]
    both = load("rubric", url=judge.url, model="m", criteria=CRITERIA, criteria_field="rubric")
    for row in ({}, {"rubric": None}, {"rubric": []}, {"rubric": ""}):
        both.check(row)
    alone = load("rubric", url=judge.url, model="m", criteria_field="rubric", context=["truth"])
    for row, message in (
        ({"truth": 1}, r"finds no rubric in the field 'rubric' \(truth\) nor in criteria"),
        ({"rubric": ["a"]}, "needs the field 'truth'"),
        ({"truth": 1, "rubric": 5}, "cannot use the rubric in the field 'rubric': got 5"),
        ({"truth": 1, "rubric": [{"weight": 1}]}, "cannot use the rubric .*0.text: Field required"),
        ({"truth": 1, "rubric": "[1"}, "it is no JSON"),
        ({"truth": 1, "rubric": [{"text": "a", "weight": -1}]}, "no criterion has a positive weight"),
        ({"truth": 1, "rubric": [{"text": "a", "scale": [1, 1]}]}, "scale goes from 1 to 1"),
        ({"truth": 1, "rubric": '[{"text": "a", "scale": [1, Infinity]}]'}, "scale goes from 1 to inf"),
    ):
        with pytest.raises(SettingError, match=message):
            alone.check(row)


async def test_turns_are_scored_one_by_one(judge: JudgeServer) -> None:
    judge.answer = lambda prompt: verdict_of(prompt, [{"1": "yes"}, {"1": "no"}])
    options = {"url": judge.url, "model": "m", "criteria": ["Is it polite?"], "by_turn": True}
    async with load("rubric", **options) as rewards:
        scored = await rewards.score(said("please", "give"), {}, None)
        assert (scored.reward, scored.turn_rewards) == (0.0, [1.0, 0.0])
        assert (await rewards.score(said(), {}, None)).turn_rewards == []
        with pytest.raises(RewardError, match="which is no list for 3 turns"):
            await rewards.score(said("a", "b", "c"), {}, None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"criteria": []}, "there is no rubric; set criteria, or criteria_field"),
        ({"criteria": [""]}, "at least 1 character"),
        ({"by_turn": True, "show": "prediction"}, "by_turn scores the turns"),
        ({"max_cost": 1.0}, "max_cost needs the prices"),
        ({"panel": [{"url": "nowhere", "model": "m"}]}, "not an address"),
        ({"api_key_env": "NO_SUCH_KEY"}, "this environment variable is not set"),
    ],
)
def test_options_that_cannot_work(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        load("rubric", **{"url": "http://u", "model": "m", "criteria": ["a"], **changed})


async def test_a_panel_gives_its_median_while_most_of_it_answers(judge: JudgeServer) -> None:
    given = {"low": 1, "middle": 2, "high": 5}

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        if (value := given.get(body["model"])) is None:
            return web.Response(status=400, text="gone")
        content = verdict_of(body["messages"][-1]["content"], value)
        return web.json_response({"choices": [{"message": {"content": content}}]})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", complete)])
    async with TestServer(app) as server:
        url = str(server.make_url("/v1"))
        panel = [{"url": url, "model": "middle"}, {"url": url, "model": "high"}]
        options = {"url": url, "criteria": [CRITERIA[1]], "panel": panel}
        scored = await rate(**options, model="low")
        assert (scored.reward, scored.metrics["rubric/spread"], scored.metrics["rubric/judges"]) == (0.25, 1.0, 3.0)
        scored = await rate(**options, model="down")
        assert (scored.reward, scored.metrics["rubric/judges"]) == ((0.25 + 1) / 2, 2.0)
        del given["high"]
        with pytest.raises(RewardError, match="status 400: gone"):
            await rate(**options, model="down")


def paid(answer: Callable[[str], str]) -> Callable[[str], dict[str, Any]]:
    usage = {"prompt_tokens": 100_000, "completion_tokens": 1000}
    return lambda prompt: {"choices": [{"message": {"content": answer(prompt)}}], "usage": usage}


async def test_equal_requests_are_sent_once(judge: JudgeServer, tmp_path: Path) -> None:
    judge.answer = lambda prompt: verdict_of(prompt, "yes", 5, "no")
    options = {"url": judge.url, "model": "m", "criteria": CRITERIA, "cache": str(tmp_path / "judges.sqlite")}
    async with load("rubric", **options) as rewards:
        chains = [said(text) for text in ("a", "a", "b", "a", "b")]
        scored = await asyncio.gather(*(rewards.score(chain, {}, None) for chain in chains))
    assert [one.reward for one in scored] == [1.0] * 5
    assert sorted(one.metrics["rubric/cached"] for one in scored) == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert len(judge.requests) == 2
    # a resumed run, with the judge gone
    judge.answer = lambda prompt: 500
    again = await rate("b", **options)
    assert (again.reward, again.metrics["rubric/cached"], len(judge.requests)) == (1.0, 1.0, 2)
    async with load("rubric", **{**options, "model": "n", "retries": 0}) as rewards:
        chains = [rewards.score(said("c"), {}, None) for _ in range(3)]
        failures = await asyncio.gather(*chains, return_exceptions=True)
    assert (len(judge.requests), {str(one)[:32] for one in failures}) == (3, {"rubric: no verdict from http://1"})
    for changed in ({"criteria": ["Is it?"]}, {"model": "n"}, {"parameters": {"temperature": 1.0}}):
        with pytest.raises(RewardError, match="status 500"):
            await rate("b", **{**options, "retries": 0, **changed})
    assert len(judge.requests) == 2 + 1 + 3


async def test_two_processes_share_the_cache_which_is_bounded(
    judge: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MOST_ANSWERS", 3)
    judge.answer = lambda prompt: verdict_of(prompt, "yes", 5, "no")
    options = {"url": judge.url, "cache": str(tmp_path / "judges.sqlite")}
    await asyncio.gather(*(rate(str(number), **options) for number in range(10)))
    with sqlite3.connect(tmp_path / "judges.sqlite") as base:
        assert base.execute("SELECT count(*), min(id) FROM answers").fetchone() == (3, 8)
        base.execute("UPDATE answers SET nonce = NULL")
    assert (await rate("9", **options)).metrics["rubric/cached"] == 0.0, "a damaged answer"
    (tmp_path / "judges.sqlite").write_text("damaged " * 1000)
    for name in ("-wal", "-shm"):
        (tmp_path / f"judges.sqlite{name}").unlink(missing_ok=True)
    with pytest.raises(RewardError, match="cannot be used: file is not a database; name another file, or remove it"):
        await rate("9", **options)
    with sqlite3.connect(tmp_path / "older.sqlite") as base:
        base.execute("CREATE TABLE answers (key TEXT)")
    with pytest.raises(RewardError, match=r"older.sqlite cannot be used: no such column: .*; name another file, or"):
        await rate("9", **{**options, "cache": str(tmp_path / "older.sqlite")})


async def test_a_budget_that_is_used_up_is_an_error(judge: JudgeServer, tmp_path: Path) -> None:
    judge.answer = paid(lambda prompt: verdict_of(prompt, "yes", 5, "no"))
    options = {"url": judge.url, "cache": str(tmp_path / "judges.sqlite"), "max_calls": 2}
    await asyncio.gather(rate("a", **options), rate("b", **options))
    with pytest.raises(RewardError, match=r"budget max_calls=2 is used up \(2 calls, cost 0\); raise it to go on"):
        await rate("c", **options)
    assert (await rate("a", **options)).reward == 1.0, "answers that were paid for"
    prices = {"price_in": 2.0, "price_out": 10.0, "max_cost": 0.5}
    async with load("rubric", url=judge.url, model="m", criteria=CRITERIA, **prices) as rewards:
        for text in "abc":
            await rewards.score(said(text), {}, None)
        with pytest.raises(RewardError, match=r"budget max_cost=0.5 is used up \(3 calls, cost 0.63\)"):
            await rewards.score(said("d"), {}, None)
    judge.answer = lambda prompt: verdict_of(prompt, "yes", 5, "no")
    with pytest.raises(RewardError, match="reports no usage, so that max_cost cannot be kept; set max_calls instead"):
        await rate(url=judge.url, **prices)
    judge.answer = lambda prompt: {"usage": {"prompt_tokens": 10**400, "completion_tokens": 1}}
    with pytest.raises(RewardError, match=r"no verdict from .*: int too large"):
        await rate(url=judge.url, **prices, retries=0)


async def test_a_judge_that_is_down_comes_back_or_costs_typed_outcomes(
    judge: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    port = unused_port()
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", judge.complete)])
    server = TestServer(app, port=port)
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        # after a minute, the server comes up
        if sum(pauses) >= 60 and server.started is False:
            await server.start_server()
        await real(0)

    monkeypatch.setattr(client.asyncio, "sleep", sleep)
    judge.answer = lambda prompt: verdict_of(prompt, "yes", 5, "no")
    url = f"http://127.0.0.1:{port}/v1"
    with pytest.raises(RewardError, match=r"no verdict from .*Cannot connect"):
        await rate(url=url)
    assert pauses == [0.5, 1, 2, 4, 8, 16]
    pauses.clear()
    assert (await rate(url=url, retries=8)).reward == 1.0
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30]
    await server.close()


async def test_a_judge_may_ask_to_be_left_alone(judge: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(client.asyncio, "sleep", sleep)
    answers = iter([*(web.Response(status=429, headers={"Retry-After": text}) for text in ("7", "1e9")), None])

    async def complete(request: web.Request) -> web.Response:
        return next(answers) or await judge.complete(request)

    judge.answer = lambda prompt: verdict_of(prompt, "yes", 5, "no")
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", complete)])
    async with TestServer(app) as server:
        with pytest.raises(RewardError, match=r"status 429, asks for 1e\+09 s: "):
            await rate(url=str(server.make_url("/v1")))
        assert (await rate(url=str(server.make_url("/v1")))).reward == 1.0
    assert [*filter(None, pauses)] == [7.5]


async def test_two_rubrics_have_names(judge: JudgeServer) -> None:
    judge.answer = lambda prompt: verdict_of(prompt, "yes")
    options = {"url": judge.url, "model": "m", "criteria": ["Is it?"]}
    entries = [RewardConfig(reward="rubric", options={**options, "name": name}) for name in ("taste", "")]
    async with Rewards(entries) as rewards:
        scored = await rewards.score(said("a"), {}, None)
    assert (scored.reward, scored.metrics["taste/criterion_1"], scored.metrics["rubric/criterion_1"]) == (2.0, 1.0, 1.0)
