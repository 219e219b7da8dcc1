"""The client of a teacher's server over real sockets: what it accepts, and how it names what it does not.

True scores, by real engines: tests/trainers/test_other_teachers.py and test_server_contract.py."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from transformers import PreTrainedTokenizerFast

from agentfactory.base.errors import SettingError
from agentfactory.rollout.config.server import TeacherServer
from agentfactory.rollout.groups.group_files import decode_group, encode_group
from agentfactory.rollout.inference import stalls, teacher_client
from agentfactory.rollout.inference.http_transport import InferenceError, ServerUnreachableError
from agentfactory.rollout.inference.inference_client import GENERATE
from agentfactory.rollout.inference.teacher_client import TeacherClient, _grades
from agentfactory.rollout.token_row import ImageSpan, Row, Span
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
from tests.chat_tokenizers import make_tokenizer
from tests.rollout.test_client import Server, turn

LONGEST = 64
Scores = list[dict[str, dict[str, Any]] | None]


class Teacher(Server):
    """A server with vLLM's answers, whose log-probabilities are a function of position and token."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.card: dict[str, Any] = {"id": "strong", "root": str(model), "max_model_len": LONGEST + 1}
        self.label = "default"
        self.shift = 0.0
        """Added to all log-probabilities: other weights."""
        self.asked: list[dict[str, Any]] = []
        self.spoil: Callable[[Scores], Any] = lambda scores: scores
        self.refusal: tuple[int, str] | None = None
        self.key: str | None = None
        self.mute = False
        self.is_silent = False

    def cards(self) -> list[dict[str, Any]]:
        return [self.card]

    async def guard(self, request: web.Request) -> web.Response | None:
        if self.mute:
            await asyncio.sleep(60)
        is_stranger = self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}"
        return web.Response(status=401) if is_stranger else None

    def logprob(self, place: int, token: int) -> float:
        return -0.5 - (place * 7 + token * 3) % 11 / 4 - self.shift

    def scores(self, ids: list[int], count: int) -> Scores:
        scores: Scores = [None]
        for place, token in enumerate(ids[1:], 1):
            # vLLM's order: the token itself, with its rank, then the most likely
            entry = {str(token): {"logprob": self.logprob(place, token), "rank": 9, "decoded_token": None}}
            for rank in range(1, count + 1):
                likely = {"logprob": -0.2 - 2.0 * rank - self.shift, "rank": rank, "decoded_token": None}
                entry[str(500 + rank)] = likely
            scores.append(entry)
        return scores

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.is_silent:
            await asyncio.sleep(60)
        self.asked.append(body)
        if self.refusal is not None:
            return web.Response(status=self.refusal[0], text=self.refusal[1])
        ids, params = body["token_ids"], body["sampling_params"]
        assert (params["max_tokens"], body["model"]) == (1, "strong")
        scores = self.spoil(self.scores(ids, params["prompt_logprobs"]))
        return turn(self.label, "length", prompt_logprobs=scores)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a policy, of which only the tokenizer is read."""
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer().save_pretrained(folder)
    return folder


@asynccontextmanager
async def teaching(model: Path, top_k: int | None = None) -> AsyncIterator[tuple[Teacher, TeacherClient]]:
    """A teacher's server, and a client that has not checked it."""
    teacher = Teacher(model)
    await teacher.start()
    try:
        async with TeacherClient(TeacherServer(f"{teacher.url}/", None, top_k), str(model), LONGEST, 1.0) as client:
            yield teacher, client
    finally:
        await teacher.stop()


def chain(*rows: Row) -> Trajectory:
    return Trajectory("c", [], list(rows), Outcome.COMPLETED)


def two_turns() -> Row:
    row = Row()
    row.append_context([5, 6, 7])
    row.append_sampled([8, 9], [-1.0, -1.0], [Span("0", 0, 2)])
    row.append_context([10])
    row.append_sampled([11], [-1.0], [Span("0", 0, 1)])
    row.append_context([12, 13])
    return row


async def test_rows_get_the_grades_of_their_sampled_tokens(model: Path) -> None:
    first, begun, none = two_turns(), two_turns(), Row([5, 6], [0, 0], [0.0, 0.0])
    begun.mask[0] = 1
    async with teaching(model) as (teacher, client):
        await client.check()
        asked = len(teacher.asked)
        assert await client.grade(chain(first, none, begun)) == 14
        wanted = [teacher.logprob(place, token) for place, token in ((3, 8), (4, 9), (6, 11))]
    # nothing after the last sampled token, and nothing for a row without one
    assert [body["token_ids"] for body in teacher.asked[asked:]] == [first.token_ids[:7]] * 2
    for row in (first, begun):
        assert row.teacher_logprobs.tolist() == pytest.approx(wanted, abs=1e-6)  # type: ignore[union-attr]
        assert row.teacher_tokens is None
    assert none.teacher_logprobs is None


async def test_the_most_likely_tokens_do_not_contain_the_sampled_one_where_it_is_less_likely(model: Path) -> None:
    row = two_turns()
    async with teaching(model, top_k=2) as (teacher, client):
        await client.check()
        await client.grade(chain(row))
        ranked = []
        for place, token in ((3, 8), (4, 9), (6, 11)):
            all_three = [(teacher.logprob(place, token), token), (-2.2, 501), (-4.2, 502)]
            ranked += sorted(all_three, reverse=True)[:2]
    assert any(token > 500 for _, token in ranked)
    assert row.teacher_tokens.tolist() == [token for _, token in ranked]  # type: ignore[union-attr]
    assert row.teacher_logprobs.tolist() == pytest.approx([value for value, _ in ranked])  # type: ignore[union-attr]


def changed(place: int, **fields: Any) -> Callable[[Scores], Scores]:
    """Change the entry of the token at a place."""

    def change(scores: Scores) -> Scores:
        entry = scores[place]
        next(iter(entry.values())).update(fields)
        return scores

    return change


SPOILED: dict[str, tuple[Callable[[Scores], Any], str]] = {
    "not a number": (changed(3, logprob=float("nan")), "sent nan as a log-probability"),
    "positive": (changed(3, logprob=0.5), "sent 0.5 as a log-probability"),
    "text": (changed(3, logprob="low"), "other prompt_logprobs than vLLM's"),
    "none": (lambda scores: None, "sent no prompt_logprobs for 7 tokens"),
    "short": (lambda scores: scores[:-1], "sent 6 prompt_logprobs for 7 tokens"),
    "another token": (lambda scores: [*scores[:2], {"3": {"logprob": -1.0}}, *scores[3:]], "other ids: token 2 is 7"),
    "a list": (lambda scores: [*scores[:3], ["8"], *scores[4:]], "other prompt_logprobs than vLLM's"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_answers_that_no_teacher_can_give_are_refused(model: Path, case: str) -> None:
    spoil, reason = SPOILED[case]
    ids = two_turns().token_ids[:7]
    with pytest.raises(InferenceError, match=reason):
        _grades(spoil(Teacher(model).scores(ids, 0)), ids, np.array([3, 4, 6]), None)


async def test_such_an_answer_fails_the_chain_and_the_check(model: Path) -> None:
    row = two_turns()
    async with teaching(model, top_k=3) as (teacher, client):
        await client.check()
        teacher.spoil = lambda scores: [one and {t: {**v, "logprob": -0.3} for t, v in one.items()} for one in scores]
        with pytest.raises(InferenceError, match=r"most likely tokens sum to 2\.222"):
            await client.grade(chain(row))
        assert row.teacher_logprobs is None
        teacher.spoil = lambda scores: None
        with pytest.raises(SettingError, match=r"teacher\.url: .* cannot grade tokens: .* no prompt_logprobs"):
            await client.check()


async def test_a_server_with_other_weights_ends_the_run(model: Path, tmp_path: Path) -> None:
    async with teaching(model) as (teacher, client):
        await client.check()
        await client.remember(tmp_path / "teacher.json")
        await client.check_weights()
        teacher.shift = 0.015
        await client.check_weights()
        teacher.shift = 0.1
        reason = r"teacher\.url: .* has other weights than when the run began: .* differ by 0\.1 nats on average"
        with pytest.raises(SettingError, match=reason):
            await client.check_weights()
        # also in a run that resumes, whatever it finds at its own start
        async with TeacherClient(TeacherServer(teacher.url), str(model), LONGEST, 1.0) as later:
            await later.check()
            with pytest.raises(SettingError, match=reason):
                await later.remember(tmp_path / "teacher.json")
            teacher.shift = 0.0
            await later.remember(tmp_path / "teacher.json")
        (tmp_path / "teacher.json").write_text("{")
        with pytest.raises(SettingError, match=r"teacher\.url: .*teacher\.json is damaged"):
            await client.remember(tmp_path / "teacher.json")
        teacher.label = "step-1"
        with pytest.raises(SettingError, match=r"graded with weights called 'step-1', and before with 'default'"):
            await client.grade(chain(two_turns()))


async def test_groups_of_an_earlier_attempt_are_graded_again(model: Path) -> None:
    """It may have been killed after the weights had changed, and before the next batch."""
    made = Group("g", {}, [chain(two_turns()), chain(two_turns())])
    async with teaching(model) as (teacher, client):
        await client.check()
        teacher.shift = 1.0
        for each in made.trajectories:
            await client.grade(each)
        saved = encode_group(made)
        wrong = decode_group(saved.line, saved.record)
        teacher.shift = 0.0
        await client.grade_again([wrong])
        row = wrong.trajectories[1].rows[0]
        assert row.teacher_logprobs[0] == pytest.approx(teacher.logprob(3, 8))  # type: ignore[index]
        teacher.spoil = lambda scores: None
        with pytest.raises(SettingError, match=r"teacher\.url: .* cannot grade tokens"):
            await client.grade_again([wrong])


UNFIT: dict[str, tuple[Callable[[Teacher], Any], str]] = {
    "short": (lambda t: t.card.update(max_model_len=LONGEST), "reads 64 tokens, .* fix: start it with .* at least 65"),
    "elsewhere": (lambda t: t.card.update(root="/nowhere/else"), "cannot be checked; fix: put its tokenizer files"),
    "few logprobs": (
        lambda t: setattr(
            t, "refusal", (400, "Requested prompt logprobs of 64, which is greater than max allowed: 20")
        ),
        "fix: start vLLM with --max-logprobs 64",
    ),
    "vLLM": (lambda t: t.routes.remove(GENERATE), "lacks /inference/v1/generate; fix: start vLLM .* with"),
    "key": (lambda t: setattr(t, "key", "s3cret"), r"requires its key, .* set teacher\.api_key_env"),
    "mute": (lambda t: setattr(t, "mute", True), r"has not answered within 0\.5 s"),
}


@pytest.mark.parametrize("case", UNFIT)
async def test_a_server_that_cannot_grade_is_refused(model: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_client, "ANSWERS_WITHIN", 0.5 if case == "mute" else 10.0)
    change, reason = UNFIT[case]
    async with teaching(model, top_k=64) as (teacher, client):
        change(teacher)
        with pytest.raises(SettingError, match=rf"teacher\.url: .*{reason}"):
            await client.check()


async def test_keys_addresses_and_top_k(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(PreTrainedTokenizerFast.from_pretrained(model))
    with pytest.raises(SettingError, match=rf"teacher\.top_k: got {size + 1}, .* {size} tokens; fix: lower it"):
        async with teaching(model, top_k=size + 1) as (_, client):
            await client.check()
    async with teaching(model) as (teacher, client):
        with pytest.raises(SettingError, match=r"teacher\.url: .* answered 404 .*; fix: .* without a path such as /v1"):
            async with TeacherClient(TeacherServer(f"{teacher.url}/v1"), str(model), LONGEST, 1.0) as below:
                await below.check()
        await client.check()
        teacher.key = "s3cret"
        with pytest.raises(
            SettingError, match=r"teacher\.url: .* refuses to grade 7 tokens: .*; fix: set teacher\.api_key"
        ):
            await client.grade(chain(two_turns()))
        with pytest.raises(SettingError, match=r"teacher\.api_key_env: the variable TEACHER_KEY is not set"):
            TeacherClient(TeacherServer(teacher.url, "TEACHER_KEY"), str(model), LONGEST, 1.0)
        monkeypatch.setenv("TEACHER_KEY", "s3cret")
        async with TeacherClient(TeacherServer(teacher.url, "TEACHER_KEY"), str(model), LONGEST, 1.0) as keyed:
            await keyed.check()
    with pytest.raises(SettingError, match=r"teacher\.url: no server answers at .* or correct teacher\.url"):
        async with TeacherClient(TeacherServer(teacher.url), str(model), LONGEST, 1.0) as gone:
            await gone.check()


async def test_another_tokenizer_is_refused_and_a_missing_token_where_a_chain_has_it(
    model: Path, tmp_path: Path
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    size = len(tokenizer)
    own, other = tmp_path / "own", tmp_path / "other"
    tokenizer.add_tokens(["<own>"])
    tokenizer.save_pretrained(own)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(other)
    async with teaching(own) as (teacher, client):
        teacher.card["root"] = str(model)
        await client.check()
        await client.grade(chain(two_turns()))
        row = two_turns()
        row.token_ids[1] = size
        with pytest.raises(SettingError, match=rf"teacher\.url: its model has no token '<own>' \({size}\)"):
            await client.grade(chain(row))
        teacher.card["root"] = str(other)
        with pytest.raises(SettingError, match=r"teacher\.url: .* has another tokenizer: token .* '<other>' there"):
            await client.check()


async def test_faults_of_single_chains_that_no_retry_heals_end_the_run(model: Path) -> None:
    async with teaching(model) as (teacher, client):
        del teacher.card["max_model_len"]
        await client.check()
        seen = two_turns()
        seen.images = [ImageSpan(0, 2, "digest", (1, 2, 4))]
        with pytest.raises(SettingError, match=r"teacher\.url: chain c has images"):
            await client.grade(chain(seen))
        teacher.refusal = (400, "Token id 99 is out of vocabulary")
        with pytest.raises(
            SettingError, match=r"teacher\.url: .* refuses to grade 7 tokens: .* whose vocabulary has all"
        ):
            await client.grade(chain(two_turns()))
        teacher.refusal = (400, "This model's maximum context length is 5 tokens")
        with pytest.raises(SettingError, match=r"teacher\.url: a chain of 7 tokens does not fit into its context"):
            await client.grade(chain(two_turns()))


@pytest.mark.parametrize("held", ["is_paused", None])
async def test_a_silent_server_is_given_up(model: Path, monkeypatch: pytest.MonkeyPatch, held: str | None) -> None:
    monkeypatch.setattr(stalls, "LOOK_SECONDS", 0.2)
    async with teaching(model) as (teacher, client):
        await client.check()
        teacher.held, teacher.page = held, lambda: "" if held is None else teacher.idle_page()
        teacher.is_silent = True
        async with asyncio.timeout(30):
            with pytest.raises(ServerUnreachableError, match="gave no token for 1 s; fix: start it again"):
                await client.grade(chain(two_turns()))
