"""Compare every text family of transformers with its model alone, and write docs/text-families.md:
`python benchmarks/text_families.py [FAMILY ...]`.

For each family, a tiny random network is trained on in three layouts and served by the embedded engine, as in the tests
of the trainer and of the engine. Named families are printed and not written. The last line is JSON.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path

import transformers

from agentfactory.rollout.inference.embedded.sampling import UnsupportedModel

sys.path.append(str(Path(__file__).parents[1]))
from tests.rollout import test_embedded_families as engine
from tests.text_families import COMPOSITE, FAMILIES, NOT_BUILT, rows_of_many_lengths, tiny_network
from tests.trainers import test_text_families as trainer

PAGE = Path(__file__).parents[1] / "docs" / "text-families.md"
COLUMNS = ("padded", "packed", "tree", "engine")
BOUND = 1e-3
"""Largest deviation in nats of an exact log-probability in float32."""


def outcomes(family: str) -> dict[str, str]:
    """Return the largest deviation in nats, or the words of the refusal, by column."""
    found: dict[str, str] = {}
    network = tiny_network(family)
    for batching in trainer.LAYOUTS:
        refused = trainer.refusal(network, batching)
        found[batching] = (
            _words(str(refused), network)
            if refused
            else f"{trainer.deviation(network, rows_of_many_lengths(), batching):.0e}"
        )
    try:
        found["engine"] = f"{max(engine.deviation(family, static) for static in (False, True)):.0e}"
    except UnsupportedModel as error:
        found["engine"] = _words(str(error), network)
    return found


def _words(refusal: str, network: object) -> str:
    """Return a refusal without the field and the fix, which are the same for all families."""
    words = refusal.partition("; fix:")[0].partition(": ")[2] if refusal.startswith(("model.", "train.")) else refusal
    words = words.removeprefix("packed would be wrong: ").removeprefix("tree would be wrong: ")
    words = words.replace(f"{type(network).__name__}: ", "").replace(f"{type(network).__name__} ", "").strip()
    return re.sub(r"(differ) by [\d.]+", r"\1", words)


def _is_refusal(outcome: str) -> bool:
    return not outcome[:1].isdigit()


def _kind(outcome: str) -> str:
    return "refused" if _is_refusal(outcome) else "exact" if float(outcome) < BOUND else "wrong"


def _page(rows: dict[str, dict[str, str]], totals: dict[str, Counter[str]]) -> str:
    reasons: dict[str, int] = {}
    lines = []
    for family, found in rows.items():
        cells = [
            f"[{reasons.setdefault(found[name], len(reasons) + 1)}](#refusals)"
            if _is_refusal(found[name])
            else f"exact ({found[name]})"
            for name in COLUMNS
        ]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    counts = "\n".join(
        f"| {'embedded engine' if name == 'engine' else f'trainer, {name}'} | {total['exact']} | {total['refused']} |"
        f" {total['wrong']} |"
        for name, total in totals.items()
    )
    words = "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    return f"""# Text models

Trainer and embedded engine compute for each token the log-probability that the model gives it in a forward pass of its
own, or refuse the model at the start. `python benchmarks/text_families.py` checks every text family of
transformers {transformers.__version__} and writes this page.

Each network is tiny and random, in float32. The trainer scores seven rows of 3 to 100 tokens in each
[layout](recipe/training.md); the [embedded engine](servers.md) decodes seven requests of different length in four
slots, with and without static decoding. Rows are longer than every window, chunk and block of the configurations. The
reference is the model's own forward pass on each row alone with eager attention. "Exact" gives the largest deviation in
nats; the bound is {BOUND:g}.

| | exact | refused | wrong |
|---|---|---|---|
{counts}

vLLM serves other families than the embedded engine; it is not part of this table. Not tested:

- {_names(COMPOSITE)}: their text models are families of their own;
- {_names(NOT_BUILT)}: they take other inputs or have no tiny configuration.

## Families

A number is a refusal, whose words follow below.

| family | padded | packed | tree | embedded engine |
|---|---|---|---|---|
{chr(10).join(lines)}

## Refusals

{words}
"""


def _names(families: set[str]) -> str:
    return ", ".join(sorted(families))


def main() -> None:
    rows: dict[str, dict[str, str]] = {}
    for family in sys.argv[1:] or FAMILIES:
        rows[family] = outcomes(family)
        print(family, rows[family], flush=True)
    totals = {name: Counter(_kind(found[name]) for found in rows.values()) for name in COLUMNS}
    if not sys.argv[1:]:
        PAGE.write_text(_page(rows, totals), encoding="utf-8")
    print(json.dumps({"families": len(rows), **totals}))


if __name__ == "__main__":
    main()
