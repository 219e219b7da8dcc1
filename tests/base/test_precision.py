"""`model.dtype: auto`: bfloat16 where this machine computes faster with it."""

import pytest
import torch

from agentfactory.base.processes import precision
from agentfactory.rollout.config import ModelConfig

pytestmark = [pytest.mark.extended, pytest.mark.processes]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is not measured")
def test_a_cpu_without_bfloat16_instructions_takes_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "measure", None)  # another process measures
    for variable in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.setenv(variable, "avx2")
    precision.fastest_dtype.cache_clear()
    model = ModelConfig.model_validate({"path": "m", "dtype": "auto"})
    precision.fastest_dtype.cache_clear()
    assert model.dtype == model.model_dump()["dtype"] == "float32"
