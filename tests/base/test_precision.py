"""`model.dtype: auto`: bfloat16 where this machine computes faster with it."""

import json
import os
import subprocess

import pytest
import torch

from agentfactory.base.processes import precision
from agentfactory.base.user_code.import_path import own_python
from agentfactory.rollout.config import ModelConfig

pytestmark = [pytest.mark.extended, pytest.mark.processes]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is not measured")
def test_a_cpu_without_bfloat16_instructions_takes_float32() -> None:
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2"}
    command = own_python("-m", "agentfactory.base.processes.precision")
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    dtype, reason = json.loads(done.stdout)
    assert dtype == "float32", reason


def test_a_recipe_has_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "measure", None)  # another process measures
    precision.fastest_dtype.cache_clear()
    model = ModelConfig.model_validate({"path": "m", "dtype": "auto"})
    assert model.dtype in ("float32", "bfloat16")
    assert model.model_dump()["dtype"] == model.dtype
