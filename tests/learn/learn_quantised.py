"""What `make learn` runs: the quickstart's second stage with an adapter, where server or trainer hold rounded weights.

Success is the server's: what it samples with rounded weights under the trained adapter. The first of SEEDS is used.
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest

from tests.learn.runs import SEEDS, assert_risen, shortened, train

ROUNDED = {
    "int8": ["server.quantization=int8"],
    "int4": ["server.quantization=int4"],
    # QLoRA, beside a plain server
    "nf4": ["model.lora.quantization=nf4"],
}
EARLY_STEPS = 10
"""In these the policy hardly changes: what the metrics show is the rounding."""
PLAIN = [f"train.steps={EARLY_STEPS}"]
"""How it learns without rounding is shown by the quickstart."""

Figures = Callable[[str], dict[str, float]]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory, habit: Path) -> Figures:
    """`figures(kind)`, each trained once: success before and after, and early means of what tells server and trainer
    apart."""
    known: dict[str, dict[str, float]] = {}

    def measure(kind: str) -> dict[str, float]:
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            overrides = [f"model.path={habit}", *(shortened(*ROUNDED[kind]) if kind in ROUNDED else PLAIN)]
            summary = train("grpo-lora.yaml", SEEDS[0], folder, *overrides)
            lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open(encoding="utf-8")]
            steps = [line for line in lines if "mismatch/mean" in line]
            names = ("mismatch/mean", "mismatch/kl", "sync/canary_noise")
            early = {name: mean(line[name] for line in steps[:EARLY_STEPS]) for name in names}
            later = {f"{name}, all steps": mean(line[name] for line in steps) for name in names}
            corrected = mean(line["mismatch/corrected"] for line in steps)
            known[kind] = {**summary, **early, **later, "mismatch/corrected": corrected}
            print(kind, json.dumps(known[kind], indent=2))
        return known[kind]

    return measure


@pytest.mark.parametrize("kind", ROUNDED)
def test_it_learns_all_the_same(figures: Figures, kind: str) -> None:
    assert_risen(figures(kind), full=0.80)


@pytest.mark.parametrize("metric", ["mismatch/mean", "mismatch/kl", "sync/canary_noise"])
def test_the_metrics_tell_the_servers_apart(figures: Figures, metric: str) -> None:
    plain, eight, four, trainer = (figures(kind)[metric] for kind in ("plain", "int8", "int4", "nf4"))
    assert plain < 1e-4
    assert eight > 10 * plain
    assert four > 2 * eight
    assert trainer > 2 * eight
