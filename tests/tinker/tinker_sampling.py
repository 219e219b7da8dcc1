"""Sampling by the real SDK: stops, seeds, logprobs that are the trainer's, and snapshots that stay as they were."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tinker.offline_hub import question
from tests.tinker.service import service

CLOSE = 1e-4
"""Bound on differences between float32 logprobs of the engine and of the trainer."""


@pytest.fixture(scope="module", params=["embedded", "vllm"])
def result(
    request: pytest.FixtureRequest, hub: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Any]]:
    if request.param == "embedded":
        yield request.getfixturevalue("running").cases("sampling.py", question(3))
        return
    options = {"python": os.environ["AGENTFACTORY_VLLM_PYTHON"]}
    with service(hub, tmp_path_factory.mktemp("vllm"), engine="vllm", options=options) as found:
        yield found.cases("sampling.py", question(3))


def test_prompts_are_scored_as_by_the_trainer(result: Callable[[str], Any]) -> None:
    found = result("prompt_scores")
    assert found["scores"][0] is None
    assert found["scores"][1:] == pytest.approx(found["trained"], abs=CLOSE)


def test_only_the_last_tokens_of_a_prompt_are_scored(result: Callable[[str], Any]) -> None:
    last, scores = result("last_scores"), result("prompt_scores")["scores"]
    assert last[:-4] == [None] * (len(scores) - 4)
    assert last[-4:] == pytest.approx(scores[-4:], abs=CLOSE)


def test_the_likeliest_tokens_of_a_prompt(result: Callable[[str], Any]) -> None:
    found = result("prompt_scores")
    assert not found["best"][0]
    for token, score, best in list(zip(found["ids"], found["scores"], found["best"], strict=True))[1:]:
        logprobs = [logprob for _, logprob in best]
        assert len(best) == 3
        assert logprobs == sorted(logprobs, reverse=True)
        expected = dict(best).get(token)
        assert score <= logprobs[-1] + CLOSE if expected is None else score == pytest.approx(expected, abs=CLOSE)


def test_a_stop_is_the_last_token(result: Callable[[str], Any]) -> None:
    found = result("stops")
    whole, reason = found["whole"]
    assert (len(whole), reason) == (8, "length")
    by_token = whole[: whole.index(found["token"]) + 1]
    assert found["by_token"] == [by_token, "stop", len(by_token)]
    ends = next(n for n, text in enumerate(found["pieces"]) if found["text"] in text)
    assert found["by_text"] == found["by_texts"] == [whole[:ends], "stop", ends]


def test_the_end_of_text_stops_by_default_only(result: Callable[[str], Any]) -> None:
    token, default, none = result("end_of_text")
    assert default == [[token], "stop"]
    assert none[0][0] == token
    assert (len(none[0]), none[1]) == (8, "length")


def test_a_seed_repeats_its_samples(result: Callable[[str], Any]) -> None:
    found = result("seeds")
    first, again, *others = found["tokens"]
    assert again == first
    assert found["logprobs"][0] == pytest.approx(found["logprobs"][1], abs=CLOSE)
    assert any(other != first for other in others)
    assert found["again"] == found["group"]
    assert len({tuple(tokens) for tokens in found["group"]}) > 1, "the samples of one request differ"
    assert found["ids"] == 13, "each sample has an id of its own"


def test_top_k_and_top_p_narrow_the_choice(result: Callable[[str], Any]) -> None:
    greedy, top_k, top_p = result("narrowed")
    assert top_k == top_p == greedy


def test_a_snapshot_stays_as_it_was(result: Callable[[str], Any]) -> None:
    found = result("frozen")
    scores, tokens = found["before"]
    assert found["after"][0] == pytest.approx(scores, abs=1e-6)
    assert found["after"][1] == tokens
    assert sum(found["later"][0]) > sum(scores) + 1


def test_sampled_tokens_are_scored_as_by_the_trainer(result: Callable[[str], Any]) -> None:
    difference = result("sampled_scores")
    print("sampled - trained, largest:", difference)
    assert difference < CLOSE
