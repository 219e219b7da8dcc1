"""An adapter that one run trains and another continues, by `accelerate launch` against a server of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import QUICKSTART, REPOSITORY
from tests.server_process import serve

LAUNCH = [
    str(Path(sys.executable).with_name("accelerate")),
    *("launch", "--config_file", str(REPOSITORY / "recipes/accelerate/single.yaml"), "-m", "agentfactory.train"),
]


def check_it_goes_on(engine: dict[str, Any], base: Path, prepared: Path, folder: Path) -> None:
    """Train an adapter on `base` for a step; continue it for two and, resumed, a third. The server of `engine` has the
    adapter from the first batch on: its log-probabilities are the trainer's."""
    recipe = str(QUICKSTART / "grpo-lora.yaml")
    settings = [
        *("prepare=null", f"model.path={base}", f"data.path={prepared}/train.jsonl", "eval.data=null"),
        *("train.warmup_steps=0", "train.checkpoint_every=1", "train.batch_size=2", "train.loss.kl.coefficient=0.01"),
    ]
    server = [f"server.{key}={json.dumps(value)}" for key, value in engine.items()]
    first = [sys.executable, "-m", "agentfactory", "train", recipe, *settings, *server, "train.steps=1"]
    subprocess.run([*first, f"output={folder}/first"], check=True)
    settings.append(f"model.lora={{from: {folder}/first/checkpoints/step-000001}}")
    served = {"model": {"path": str(base), "dtype": "float32", "lora": {"rank": 8}}, "server": engine}
    with serve(served, folder) as url:
        second = [*LAUNCH, recipe, *settings, f"server.url={url}", f"output={folder}/second"]
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
        subprocess.run([*second, "train.steps=2"], check=True, env=environment)
        subprocess.run(
            [*second, "train.steps=3", "--resume", f"{folder}/second/checkpoints/step-000002"],
            check=True,
            env=environment,
        )
    lines = [json.loads(line) for line in (folder / "second" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert steps[0]["kl"] == 0, "the reference is the continued adapter"
    assert 0 < steps[1]["kl"] < steps[2]["kl"]
    assert max(step["mismatch/max"] for step in steps) <= 1e-4
