"""Part of `make learn`: the quickstart's second stage with an adapter, where server or trainer hold rounded weights.

Success is the server's: what it samples with rounded weights under the trained adapter. The first of SEEDS is used."""

from pathlib import Path

import pytest

from tests.learn.runs import SEEDS, assert_risen, shortened, train

ROUNDED = {
    "int8": "server.quantization=int8",
    "int4": "server.quantization=int4",
    # QLoRA, beside a plain server
    "nf4": "model.lora.quantization=nf4",
}


@pytest.mark.parametrize("kind", ROUNDED)
def test_it_learns_all_the_same(tmp_path: Path, habit: Path, kind: str) -> None:
    summary = train("grpo-lora.yaml", SEEDS[0], tmp_path, *shortened(f"model.path={habit}", ROUNDED[kind]))
    assert_risen(summary, full=0.80)
