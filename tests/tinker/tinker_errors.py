"""Mistakes of clients end in errors that name the field and the fix; the next request works as if nothing had been."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.tinker.service import Service

WORDS = {
    "base model": ("base_model", "nobody/nothing", "Qwen3-8B-Base"),
    "rank": ("rank", "64", "32"),
    "optimizer": ("dimuon", "adamw"),
    "targets": ("target_tokens", "4", "5"),
    "weights": ("weights", "3", "5"),
    "input id": ("data[0].model_input", "439"),
    "target id": ("data[0].loss_fn_inputs.target_tokens", "439"),
    "advantages": ("advantages",),
    "not a number": ("advantages",),
    "loss": ("cosine", "cross_entropy"),
    "stable_reinforce": ("stable_reinforce", "importance_sampling"),
    "setting": ("clip_low", "clip_low_threshold"),
    "trained image": ("image",),
    "sampled image": ("image",),
    "sampled id": ("439",),
    "long prompt": ("5000", "2048"),
    "temperature": ("temperature", "0"),
    "rate": ("learning_rate", "0"),
    "lifetime": ("ttl_seconds", "1"),
    "name": ("path",),
    "sampler's name": ("path",),
    "state": ("tinker://../../etc/passwd",),
    "long state": ("tinker://a/weights/../../../etc/passwd",),
    "sampler": ("tinker://../sampler_weights/passwd",),
    "deleted": ("passwd",),
    "unknown run": ("nobody:train:0",),
}
"""A mistake of clients/errors.py -> what its error must contain."""
TYPES = {"RequestFailedError", "BadRequestError", "NotFoundError", "UnprocessableEntityError"}


@pytest.fixture(scope="module")
def result(running: Service) -> Callable[[str], Any]:
    return running.cases("errors.py")


@pytest.mark.parametrize("mistake", WORDS)
def test_a_mistake_is_named(result: Callable[[str], Any], mistake: str) -> None:
    error = result("mistakes")[mistake]
    print(error)
    assert error["type"] in TYPES
    assert [word for word in WORDS[mistake] if word not in error["text"].replace(",", "")] == []
    assert "Traceback" not in error["text"]


def test_every_mistake_is_checked(result: Callable[[str], Any]) -> None:
    found = result("mistakes")
    assert found.keys() == WORDS.keys()
    after = [error["next"] for error in found.values()]
    assert after == [after[0]] * len(after), "no mistake has trained or broken the model"


def test_a_failed_pass_fails_the_step_that_waits_for_it(result: Callable[[str], Any]) -> None:
    broken, stepped, after, new = result("failed_pass")
    assert (broken, stepped) == ("RequestFailedError", "RequestFailedError")
    assert after == new, "neither changed the model"


def test_another_key_is_refused(running: Service) -> None:
    asking = "import tinker; tinker.RestClient().get_server_capabilities().result()"
    ended = running.program("-c", asking, TINKER_API_KEY="tml-of-another")
    assert ended.returncode != 0
    assert "AuthenticationError" in ended.stderr
