"""`model.dtype: auto`: bfloat16 where this machine computes faster with it."""

from pathlib import Path

import pytest
import torch

from agentfactory.base.processes import devices, parent_watch
from agentfactory.trainers.config import TrainRecipe

pytestmark = [pytest.mark.extended, pytest.mark.processes]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test is about CPUs")
def test_a_cpu_without_bfloat16_instructions_takes_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "measure", None)  # another process measures
    for variable in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.setenv(variable, "avx2")
    devices.measured.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = {"model": {"path": "m"}, "train": {"steps": 1}}
    assert TrainRecipe.model_validate(recipe).model.model_dump(exclude_unset=True)["dtype"] == "float32"
    # measured once per machine; and recipes for another machine's GPU are not measured
    devices.measured.cache_clear()
    monkeypatch.setattr(parent_watch, "answer_of", None)
    assert TrainRecipe.model_validate(recipe).model.dtype == "float32"
    assert TrainRecipe.model_validate({**recipe, "placement": {"gpu_memory_gib": 24}}).model.dtype == "bfloat16"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx512")
    assert devices._kept().name not in [file.name for file in (tmp_path / "agentfactory").iterdir()]
    devices.measured.cache_clear()
