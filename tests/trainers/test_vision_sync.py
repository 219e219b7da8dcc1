"""A trained vision tower on the embedded engine: synced and proven, and a cached image is encoded again."""

from pathlib import Path

import pytest

from agentfactory.base.run_notices import notice_of
from tests.server_process import serve
from tests.vision_models import KINDS, make_vision_model
from tests.vision_training import STEPS, SeeingRun

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("kind", KINDS)
def test_the_server_sees_with_the_trained_tower(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = {"path": str(make_vision_model(tmp_path / "model", kind)), "dtype": "float32"}
    with serve({"model": model, "server": {"engine": "embedded", "max_model_len": 512}}, tmp_path) as url:
        run = SeeingRun(tmp_path, url)
        for version in range(STEPS + 1):
            proof = run.push(version)
            run.train()
    assert proof["sync/canary_noise"] < 1e-4
    assert proof["sync/canary_slope"] == pytest.approx(1.0, abs=0.01)
    assert not [record for record in caplog.records if notice_of(record)], "every weight is proven by its content"
