"""Time sharing end to end: train.py, worker and embedded engine on the CPU, killed halfway and resumed."""

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from agentfactory.trainers.sync.server_control import ServerControl
from tests.conftest import QUICKSTART
from tests.forked import TRAINER, Forked, start_engine

pytestmark = pytest.mark.processes


def lines(output: Path) -> list[dict[str, Any]]:
    """The steps in complete lines of metrics.jsonl."""
    file = output / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    logged = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in logged if "loss" in line]


@pytest.mark.long
def test_a_run_that_takes_turns_is_killed_and_resumed(quickstart_run: Path, warm_start: Path, tmp_path: Path) -> None:
    engine, url = start_engine(
        *(warm_start, "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "32"),
        log=tmp_path / "engine.log",
    )
    server, output = ServerControl(url), tmp_path / "run"
    prepared = quickstart_run / "prepared"
    overrides = [
        *("prepare=null", f"data.path={prepared}/train.jsonl", f"eval.data.path={prepared}/heldout.jsonl"),
        *("eval.data.limit=4", f"model.path={warm_start}", f"server.url={url}", f"output={output}"),
        *("placement.mode=time_share", "rollout.group_size=4", "train.batch_size=4"),
        *("train.warmup_steps=0", "train.checkpoint_every=2"),
    ]

    def start(*arguments: str) -> Forked:
        command = (str(QUICKSTART / "grpo-lora.yaml"), *overrides, *arguments)
        return Forked(TRAINER, *command, log=tmp_path / "train.log")

    try:
        # it is killed long before its end, however late
        trainer = start("train.steps=1000")
        deadline = time.monotonic() + 120
        while not lines(output):
            assert trainer.is_running(), trainer.log.read_text()
            assert time.monotonic() < deadline, trainer.log.read_text()
            time.sleep(0.002)
        # at any moment: the server may be asleep, or half awake
        time.sleep(random.uniform(0, 0.3))
        assert trainer.kill(signal.SIGKILL) == -signal.SIGKILL
        total = len(lines(output)) + 3
        trainer = start("--resume", f"train.steps={total}")
        assert trainer.wait() == 0, trainer.log.read_text()
        assert not server.is_sleeping()
    finally:
        engine.kill(signal.SIGTERM)
    steps = lines(output)
    assert [line["step"] for line in steps] == list(range(1, total + 1))
    assert all(line["seconds/sleep"] > 0 and 0 < line["seconds/wake"] < line["seconds/sync"] for line in steps)
    assert {line["staleness/max"] for line in steps} == {0}
    assert max(line["mismatch/max"] for line in steps) < 1e-3
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", total)
    assert {"success_before", "success_after"} <= summary.keys()
