"""Taking turns with vLLM: what of it has no GPU. On a CPU it says that it sleeps, holds requests back, and keeps its
memory.

The names of the files here keep them out of `make test`; `make test-vllm` runs them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.server_control import SLEEP_ROUTES, ServerControl
from tests.rollout.test_server_contract import make_model
from tests.server_process import VLLM_PYTHON, serve
from tests.trainers.test_time_share import (
    CACHE,
    SLEEP,
    UPDATE,
    Recorder,
    check_metrics,
    cut_by_sleep,
    recording,
    take_turns,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(scope="module", params=[None, {"rank": 4}], ids=["full", "lora"])
def served(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[str, Any] | None, str]]:
    """`model.lora`, and the address of a server that takes adapters, or full weights by file."""
    lora: dict[str, Any] | None = request.param
    server = {"engine": "vllm", "python": VLLM_PYTHON, "max_model_len": 512, "max_num_seqs": 16, "max_loras": 2}
    recipe = {"model": {"path": str(model), "dtype": "float32", "lora": lora}, "server": server}
    with serve(recipe, tmp_path_factory.mktemp("server"), weight_transfer=None if lora else "file") as url:
        yield lora, url


@pytest.fixture
def recorder(served: tuple[dict[str, Any] | None, str]) -> Iterator[Recorder]:
    with recording(served[1]) as made:
        yield made


def test_the_order_of_turns(
    served: tuple[dict[str, Any] | None, str],
    model: Path,
    recorder: Recorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lora, _ = served

    def make_recipe(lora: dict[str, Any] | None = None, **train: Any) -> TrainRecipe:
        return TrainRecipe.model_validate(
            {"model": {"path": str(model), "dtype": "float32", "lora": lora}, "train": {"steps": 1, **train}}
        )

    ServerControl(recorder.url).require(SLEEP_ROUTES)
    logged = take_turns(make_recipe, lora, recorder, tmp_path, monkeypatch)
    turn = [*SLEEP, "trainer: to_device", "trainer: to_host"]
    if lora:
        assert recorder.calls[-9:] == [
            *(*turn[-1:], "/wake_up?tags=weights", "unload run-1-v0", "unload run-1-v1"),
            *("load run-1-v1", "load run-1-v2", *CACHE),
        ]
    else:
        assert recorder.calls[-len(turn) - len(UPDATE) :] == [*turn, *UPDATE]
    check_metrics(logged)


async def test_a_turn_that_sleep_cuts_is_sampled_again_from_its_ids(recorder: Recorder) -> None:
    await cut_by_sleep(recorder, tokens=480)
