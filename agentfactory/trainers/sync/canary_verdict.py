"""Drift: a check that changes of the server's log-probabilities follow the trainer's. A pure state machine.

Server and trainer score the same tokens at every version. If the server has the trainer's weights, both change in the
same way, even if they disagree by a constant. Changes below the noise of scoring prove nothing.

They are compared over all tokens, and the server must not deviate in any context: if one of several servers behind an
address was not updated, its contexts deviate. If the two have different weights by design (a quantised server, QLoRA),
medians over the contexts are compared, since in one or two rounding dominates: they do not detect three stale contexts
of eight. A server is compared with itself over all tokens."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

Scores = Float[np.ndarray, "tokens"]
"""Log-probabilities of the canary's tokens, context by context, in nats."""

PROVABLE = 3.0
"""Multiple of the noise that a change must exceed to prove anything."""
SLOPES = (0.5, 1.5)
"""Bounds for the server's change divided by the trainer's: 0 is a server that did not change, 1 follows exactly."""
ASTRAY = 10.0
"""Multiple of the noise that limits the server's distance from the trainer, together with half of the trainer's change.
A server beyond it serves weights of no version, even if the change proves nothing."""
LEAST_NOISE = {"float32": 1e-5, "bfloat16": 2.0**-9}
"""Minimum noise by precision, since two passes may agree exactly by chance: the rounding error of a logit of 1 in
bfloat16, and several times that error in float32."""
MOST_NOISE = 1.0
"""Maximum noise; beyond it, server and trainer do not have the same model."""


@dataclass(frozen=True)
class Verdict:
    """The result of one version's scores. All values are root mean squares over tokens, in nats."""

    provable: bool
    """True if the trainer's change since the last proven version is large enough to prove anything."""
    drift: float
    """The trainer's change since the last proven version; with rounded weights, its median over the contexts."""
    cache_gap: float
    """Difference between the server's scores with and without its prefix cache, over all tokens."""
    slope: float | None = None
    """Slope of the server's change over the trainer's, by least squares through the origin; with rounded weights, its
    median over the contexts. None if not provable."""
    failure: str | None = None
    """The evidence that the server does not serve the trainer's weights; None if there is none."""


class Drift:
    """The history of scores. Call `start` once, then `judge` per version. Failures are in the verdict, never raised."""

    def __init__(self, dtype: str, contexts: int, rounded: bool = False) -> None:
        """`dtype` is the precision of the forward passes, a key of LEAST_NOISE. All scores have the same number of
        tokens for each of the `contexts` contexts. `rounded`: server and trainer have different weights by design."""
        self.noise = LEAST_NOISE[dtype]
        """Difference between two scores of the same weights, measured at the start."""
        self._contexts = contexts
        self._rounded = rounded
        self._proven: tuple[Scores, Scores] | None = None
        self._latest: Scores | None = None

    @property
    def started(self) -> bool:
        return self._proven is not None

    def start(self, server: Scores, fresh: Scores, trainer: Scores) -> Verdict:
        """Judge the first version, by scores with the prefix cache and without it (`fresh`), and measure the noise."""
        gap = _rms(server - fresh)
        self.noise = max(self._size(server - trainer), gap, self.noise)
        self._proven, self._latest = (server, trainer), server
        told = f"the server's log-probabilities are {self.noise:.3g} nats from the trainer's at the start: it serves "
        failure = None if self.noise <= MOST_NOISE else f"{told}another model, or still has the weights of another run"
        return Verdict(provable=False, drift=0.0, cache_gap=gap, failure=failure)

    def judge(self, server: Scores, fresh: Scores, trainer: Scores) -> Verdict:
        """Judge a later version. If proven, it becomes the baseline of later changes."""
        assert self._proven is not None
        gap = _rms(server - fresh)
        served, trained = server - self._proven[0], trainer - self._proven[1]
        drift = self._size(trained)
        far, moved = self._furthest(served - trained, trained)
        provable = drift > PROVABLE * self.noise
        slope = self._slope(served, trained) if provable else None
        failure = None
        if not gap <= PROVABLE * self.noise:
            failure = f"with its prefix cache the server's log-probabilities are {gap:.3g} nats from those without it: "
            failure += "it uses caches of older weights"
        elif slope is not None and not SLOPES[0] < slope < SLOPES[1]:
            failure = f"the trainer's log-probabilities moved by {drift:.3g} nats since the last proven version, and "
            failure += f"the server's by {slope:.3g} times that: it serves other weights"
        elif not far <= ASTRAY * self.noise + 0.5 * moved:
            failure = f"the server's log-probabilities moved {far:.3g} nats away from the trainer's, which moved by "
            failure += f"{moved:.3g}: it serves other weights"
        if failure is None:
            self._latest = server
            if provable:
                self._proven = server, trainer
        return Verdict(provable, drift, gap, slope, failure)

    def judge_again(self, server: Scores) -> Verdict:
        """Judge the latest version again: the server must score as before, perhaps in the first contexts only."""
        assert self._latest is not None
        gap = _rms(server - self._latest[: len(server)])
        told = f"the server's log-probabilities are {gap:.3g} nats from those with which it proved this version"
        failure = None if gap <= PROVABLE * self.noise else told
        return Verdict(provable=True, drift=0.0, cache_gap=gap, failure=failure)

    def _size(self, values: Scores) -> float:
        return float(np.median(self._sizes(values))) if self._rounded else _rms(values)

    def _sizes(self, values: Scores) -> Float[np.ndarray, "contexts"]:
        return np.sqrt(np.mean(np.square(values.reshape(self._contexts, -1)), axis=1))

    def _furthest(self, astray: Scores, trained: Scores) -> tuple[float, float]:
        """Return server's distance and trainer's change in the context where the former exceeds the latter most."""
        if self._rounded:
            return self._size(astray), self._size(trained)
        far, moved = self._sizes(astray), self._sizes(trained)
        worst = np.argmax(far - 0.5 * moved)  # the position of a NaN if there is one
        return float(far[worst]), float(moved[worst])

    def _slope(self, served: Scores, trained: Scores) -> float:
        """Return the slope. With rounded weights, use the contexts where the trainer's change exceeds the noise."""
        if not self._rounded:
            return float(served @ trained / (trained @ trained))
        moved = self._sizes(trained) > self.noise
        x, y = (values.reshape(self._contexts, -1)[moved] for values in (trained, served))
        return float(np.median((x * y).sum(1) / (x * x).sum(1)))


def judge_rows(gap: Scores, touched: np.ndarray, dtype: str) -> str | None:
    """Return the evidence that a server lacks the trained rows of tokens: where scores depend on them (`touched`),
    their `gap` between server and trainer is far wider than elsewhere. None if there is none."""
    elsewhere = max(_rms(gap[~touched]), LEAST_NOISE[dtype])
    far = _rms(gap[touched])
    if far <= ASTRAY * elsewhere:
        return None
    told = f"the server's log-probabilities of tokens with trained rows are {far:.3g} nats from the trainer's, and"
    return f"{told} those of other tokens {elsewhere:.3g}: it does not have these rows"


def _rms(values: Scores) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
