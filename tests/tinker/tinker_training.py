"""Training by the real SDK: losses, custom losses, gradients that add up, several models at once."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.tinker.offline_hub import BASE, question
from tests.tinker.service import Service


@pytest.fixture(scope="module")
def result(running: Service) -> Callable[[str], Any]:
    return running.cases("training.py", question(3))


def test_a_model_names_its_rank_and_its_tokenizers_folder(result: Callable[[str], Any], hub: Path) -> None:
    info = result("info")
    assert (info["rank"], info["tokenizer"]) == (4, str(hub / BASE))


@pytest.mark.parametrize("loss", ["ppo", "dro"])
def test_a_loss_learns(result: Callable[[str], Any], loss: str) -> None:
    rewards = result(loss)
    print(loss, "rewards:", rewards)
    assert rewards[0] < 0.65
    assert fmean(rewards[-3:]) > 0.8


def test_an_evaluation_does_not_train(result: Callable[[str], Any]) -> None:
    plain, evaluating = result("forward_only")
    assert evaluating == plain


def test_gradients_add_up_until_the_step(result: Callable[[str], Any]) -> None:
    together, apart = result("gradients_add_up")
    assert apart == pytest.approx(together, rel=1e-4)


def test_a_call_of_several_requests_is_one_sum(result: Callable[[str], Any]) -> None:
    outputs, total, one = result("chunks")
    assert outputs == 1030
    assert total == pytest.approx(1030 * one, rel=1e-5)


def test_a_custom_loss_trains_as_the_loss_that_it_equals(result: Callable[[str], Any]) -> None:
    found = result("custom")
    theirs, own = found["losses"]
    assert own == pytest.approx(theirs, rel=1e-5)
    assert found["metrics"]["datums"] == 2
    assert found["metrics"]["loss:sum"] == pytest.approx(found["metrics"]["surrogate_loss:sum"], rel=1e-5)
    before, after = found["unlearnt"]
    assert after > before, "weights below zero make tokens less likely"


def test_a_position_has_several_weighted_targets(result: Callable[[str], Any]) -> None:
    service, own, after = result("soft_targets")
    assert service == pytest.approx(own, rel=1e-5)
    assert after < service - 0.1


def test_models_of_different_ranks_train_at_once_as_alone(result: Callable[[str], Any]) -> None:
    found = result("interleaved")
    at_once, alone = found[:3], found[3:]
    print("losses:", at_once)
    assert at_once == alone
    assert all(losses[-1] < 0.7 * losses[0] for losses in at_once)
