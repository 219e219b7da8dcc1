"""An update in bfloat16 compared with the same in FP8 (`train.precision`).

The model is a random Qwen2. On a GPU it has the shape of Qwen2.5-0.5B (`--size 1.5b`: of Qwen2.5-1.5B), and its layers
are compiled, without which FP8's casts would cost more than it saves. On a CPU it is a tiny one in float32 with
emulated FP8, not compiled, which tests the code but does not predict a GPU's results.

The last line is JSON; earlier lines of JSON are what was known then. `update_tokens` and `update_seconds` are of one
update without FP8, on packed rows with gradient checkpointing, and `mfu_update` is its share of the GPU's peak in
bfloat16, as placement.py computes it. `fp8_vs_auto` and `fp8_rowwise_vs_auto` are the tokens per second with FP8
divided by those without. `_lora`: with an adapter; not with fp8_rowwise under `--quick`. Shares of the peak appear only
on a GPU. Without torchao, or on a GPU without FP8, the comparison is skipped.

    python benchmarks/fp8.py [--quick] [--size 0.5b|1.5b]
"""

import argparse
import gc
import tempfile
from pathlib import Path

import torch
from placement import SIZES, device, make_model, measure_update, show

from agentfactory.base.errors import SettingError


def compare(name: str, quick: bool) -> None:
    """Run all updates in this process, which imports everything once, and print the ratios."""
    size, found = SIZES[name], {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(size, folder)
        for lora in (False, True):
            suffix, rate = "_lora" if lora else "", 0.0
            for precision in ("auto", "fp8", "fp8_rowwise"):
                if quick and lora and precision == "fp8_rowwise":
                    continue
                torch._dynamo.reset()
                gc.collect()
                try:
                    measured = measure_update(size, folder, lora, compile=device() == "cuda", precision=precision)
                except SettingError as error:
                    print(error, flush=True)
                    break
                shown = {key: round(value, 3) for key, value in measured.items()}
                print(f"  {precision:12} {'adapter' if lora else 'full weights':13} {shown}", flush=True)
                if precision == "auto":
                    rate = measured["tokens_per_second"]
                    found |= {f"update_{key}{suffix}": measured[key] for key in ("tokens", "seconds")}
                    found |= {f"mfu_update{suffix}": measured["mfu"]} if "mfu" in measured else {}
                else:
                    found[f"{precision}_vs_auto{suffix}"] = measured["tokens_per_second"] / rate
                show(found)


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without fp8_rowwise under an adapter")
    parser.add_argument("--size", choices=["0.5b", "1.5b"], default="0.5b", help="on a GPU; on a CPU it is tiny")
    options = parser.parse_args()
    compare(options.size if device() == "cuda" else "tiny", options.quick)


if __name__ == "__main__":
    main()
