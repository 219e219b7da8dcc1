"""Drift: does the server's change of log-probability follow the trainer's? A pure state machine, one per server.

The same tokens are scored by server and trainer at every version. Both change from version to version; a server that
has taken the trainer's weights changes as the trainer does, whatever they disagree about all the time. What a change
can prove is bounded by the noise of scoring: below it nothing is said.

Server and trainer are compared over all tokens, and the server must go astray in no context: of several servers behind
one address, one that stands still shows in the contexts that it answers for. Where they hold other weights by design
(a quantised server, QLoRA), they are compared by medians over the contexts, to which three stale ones of eight do not
show: most contexts follow all the same, but in one or two the rounding decides what the policy makes of them, and there
their changes have little to do with each other. A server is compared with itself (its caches, its state before a
restart) over all tokens.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

Scores = Float[np.ndarray, "tokens"]
"""Log-probabilities of the canary's tokens, context by context, in nats."""

PROVABLE = 3.0
"""A change says something once it exceeds this many times the noise."""
SLOPES = (0.5, 1.5)
"""The server's change over the trainer's must lie between these: 0 is a server that stands still, 1 follows."""
ASTRAY = 10.0
"""A server must not differ from the trainer's change by more than this many times the noise, and half that change,
also where the trainer's change alone proves nothing: it would serve weights that are no version's."""
LEAST_NOISE = {"float32": 1e-5, "bfloat16": 2.0**-9}
"""By precision, since two passes may agree exactly by chance: the rounding of a logit of 1 in bfloat16; several of it
in float32."""
MOST_NOISE = 1.0
"""Beyond it, server and trainer do not hold the same model."""


@dataclass(frozen=True)
class Verdict:
    """What one version's scores prove. All figures in nats, root mean squares over tokens."""

    provable: bool
    """Whether the trainer's change since the last proven version is large enough to prove anything."""
    drift: float
    """The trainer's change since the last proven version; where weights are rounded, its median over the contexts."""
    cache_gap: float
    """How far the server's scores with its prefix cache are from those without, over all tokens."""
    slope: float | None = None
    """Of the server's change over the trainer's, by least squares through the origin; where weights are rounded, its
    median over the contexts. None where not provable."""
    failure: str | None = None
    """Why the server does not serve what the trainer has sent; None where nothing speaks against it."""


class Drift:
    """What was scored when: `start` once, then `judge` per version. Raises nothing: a verdict tells."""

    def __init__(self, dtype: str, contexts: int, rounded: bool = False) -> None:
        """`dtype` is the precision of the scores' forward passes, a key of LEAST_NOISE; all scores hold equally many
        tokens of each of `contexts`; `rounded`: server and trainer hold other weights by design."""
        self.noise = LEAST_NOISE[dtype]
        """Difference of two scores of the same weights, as measured at the start."""
        self._contexts = contexts
        self._rounded = rounded
        self._proven: tuple[Scores, Scores] | None = None
        self._latest: Scores | None = None

    @property
    def started(self) -> bool:
        """Whether `start` was called."""
        return self._proven is not None

    def start(self, server: Scores, fresh: Scores, trainer: Scores) -> Verdict:
        """The first version, in server and trainer: measures the noise. `fresh` are the server's scores without its
        prefix cache, `server` those that read it."""
        gap = _rms(server - fresh)
        self.noise = max(self._size(server - trainer), gap, self.noise)
        self._proven, self._latest = (server, trainer), server
        failure = None
        if not self.noise <= MOST_NOISE:
            failure = f"the server's log-probabilities are {self.noise:.3g} nats from the trainer's at the start: it "
            failure += "serves another model"
        return Verdict(provable=False, drift=0.0, cache_gap=gap, failure=failure)

    def judge(self, server: Scores, fresh: Scores, trainer: Scores) -> Verdict:
        """A later version. Where it is proven, later changes are counted from it."""
        assert self._proven is not None
        gap = _rms(server - fresh)
        served, trained = server - self._proven[0], trainer - self._proven[1]
        drift = self._size(trained)
        far, moved = self._furthest(served - trained, trained)
        provable = drift > PROVABLE * self.noise
        slope = self._slope(served, trained) if provable else None
        failure = None
        if not gap <= PROVABLE * self.noise:
            failure = (
                f"with its prefix cache the server's log-probabilities are {gap:.3g} nats from those computed anew: it "
                "uses caches of older weights"
            )
        elif slope is not None and not SLOPES[0] < slope < SLOPES[1]:
            failure = (
                f"the trainer's log-probabilities moved by {drift:.3g} nats since the last proven version, and the "
                f"server's by {slope:.3g} times that: it serves other weights"
            )
        elif not far <= ASTRAY * self.noise + 0.5 * moved:
            failure = (
                f"the server's log-probabilities moved {far:.3g} nats away from the trainer's, which moved by "
                f"{moved:.3g}: it serves other weights"
            )
        if failure is None:
            self._latest = server
            if provable:
                self._proven = server, trainer
        return Verdict(provable, drift, gap, slope, failure)

    def judge_again(self, server: Scores) -> Verdict:
        """The latest version once more, after the server was started again: it must score as it did before."""
        assert self._latest is not None
        gap = _rms(server - self._latest)
        failure = None
        if not gap <= PROVABLE * self.noise:
            failure = f"the server's log-probabilities are {gap:.3g} nats from what they were before its restart"
        return Verdict(provable=True, drift=0.0, cache_gap=gap, failure=failure)

    def _size(self, values: Scores) -> float:
        return float(np.median(self._sizes(values))) if self._rounded else _rms(values)

    def _sizes(self, values: Scores) -> Float[np.ndarray, "contexts"]:
        """Root mean square over each context's tokens."""
        return np.sqrt(np.mean(np.square(values.reshape(self._contexts, -1)), axis=1))

    def _furthest(self, astray: Scores, trained: Scores) -> tuple[float, float]:
        """How far the server is from the trainer, and the trainer's change: in the context where that is most beside
        the trainer's change."""
        if self._rounded:
            return self._size(astray), self._size(trained)
        far, moved = self._sizes(astray), self._sizes(trained)
        worst = np.argmax(far - 0.5 * moved)  # of a figure that is no number, that one
        return float(far[worst]), float(moved[worst])

    def _slope(self, served: Scores, trained: Scores) -> float:
        """Where weights are rounded, over the contexts in which the trainer's change is more than noise: at least half
        of them."""
        if not self._rounded:
            return float(served @ trained / (trained @ trained))
        moved = self._sizes(trained) > self.noise
        x, y = (values.reshape(self._contexts, -1)[moved] for values in (trained, served))
        return float(np.median((x * y).sum(1) / (x * x).sum(1)))


def _rms(values: Scores) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
