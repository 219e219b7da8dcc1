"""Draws what `make learn CURVES=FOLDER` has left there: python tests/learn/draw_curves.py FOLDER PICTURE.png"""

import json
import sys
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

SMOOTHED = 5
"""Steps of which a point of a line is the mean."""


def main(folder: Path, picture: Path) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for file in sorted(folder.glob("*.jsonl")):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        trained = [(row["step"], row["success"]) for row in rows if "success" in row]
        held_out = [(row["step"], row["eval/sampled/success"]) for row in rows if "eval/sampled/success" in row]
        means = [fmean(value for other, value in trained if step - SMOOTHED < other <= step) for step, _ in trained]
        (line,) = axes.plot([step for step, _ in trained], means, label=file.stem, linewidth=1.4)
        axes.plot(*zip(*held_out, strict=True), "o", color=line.get_color())
    axes.set(xlabel="step", ylabel="success", title=f"lines: mean of {SMOOTHED} steps; dots: held-out tasks")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
