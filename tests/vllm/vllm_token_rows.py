"""Rows of tokens, trained beside an adapter, on real vLLM: an adapter of embedding and head, proven by the canary."""

from pathlib import Path

import pytest

from agentfactory.trainers.sync.server_control import SyncError
from tests.server_process import VLLM_PYTHON, serve
from tests.untrained_tokens import make_needs, make_untrained, push_versions


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_pushed_rows_are_proven(kind: str, tmp_path: Path) -> None:
    """Qwen3 with tied tables, and Qwen2, whose tables vLLM itself gives no adapters."""
    needs = make_needs()
    model = make_untrained(kind, tmp_path / "model", needs)
    recipe = {
        "model": {"path": str(model), "dtype": "float32", "lora": {"rank": 2, "trainable_tokens": "auto"}},
        "server": {"engine": "vllm", "max_model_len": 160, "max_num_seqs": 8, "options": {"python": VLLM_PYTHON}},
    }
    with serve(recipe, tmp_path) as url:
        metrics = push_versions(model, needs, url, tmp_path / "sync")
        assert metrics["sync/provable"] == 1.0
        assert metrics["sync/canary_slope"] == pytest.approx(1.0, abs=0.01)
        with pytest.raises(SyncError, match=r"it does not have these rows|from the trainer's at the start"):
            push_versions(model, needs, url, tmp_path / "lost", "lm_head")
