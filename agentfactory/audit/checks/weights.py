"""Weights: the server's log-probabilities against the trainer's, and the age of what was trained."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentfactory.audit.check import Check
from agentfactory.audit.record import LOGPROBS, TRAINED, Places, Seen
from agentfactory.audit.run_record import version_of
from agentfactory.base.findings import Evidence, Finding
from agentfactory.rollout.text.token_roles import ROLES
from agentfactory.rollout.token_row import Row

EXACT, ROUNDED = 5e-4, 0.06
"""Mean difference, in nats, that servers and trainers have from rounding: in float32, and otherwise."""
FACTOR, FITTED = 0.1, 0.98
"""Distance of a slope from 1, and share of the variance that it explains, of log-odds that differ by a factor, as those
of two likely tokens do at another temperature."""
SURE = -1e-3
"""Log-probability of tokens that say nothing about a temperature."""
SOME, AGREE = 0.1, 0.1
"""Share of the chains that differ, and that agree, if servers differ; chains agree within this share of rounding."""


@dataclass
class _Sum:
    total: float = 0.0
    count: int = 0

    def add(self, gaps: np.ndarray) -> None:
        self.total += float(np.abs(gaps).sum())
        self.count += gaps.size

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass
class _Fit:
    """Sums for a line through the trainer's log-odds over the server's."""

    sums: np.ndarray = field(default_factory=lambda: np.zeros(6))

    def add(self, server: np.ndarray, trainer: np.ndarray) -> None:
        x, y = server.astype(np.float64), trainer.astype(np.float64)
        self.sums += [x.size, x.sum(), y.sum(), (x * x).sum(), (x * y).sum(), (y * y).sum()]

    def line(self) -> tuple[float, float]:
        """Return the slope, and the share of the variance that the line explains."""
        n, x, y, xx, xy, yy = self.sums
        spread, common, other = n * xx - x * x, n * xy - x * y, n * yy - y * y
        if spread <= 0 or other <= 0:
            return 1.0, 0.0
        return common / spread, common * common / (spread * other)


class WeightCheck(Check):
    """Tokens must be sampled by weights that the run published, at most rollout.max_staleness versions ago. Trainer and
    server must agree on the log-probability of tokens that the newest weights sampled."""

    topic = "weights"
    needs = (LOGPROBS, TRAINED)

    def begin(self) -> None:
        recipe = self.record.recipe
        exact = recipe is not None and recipe.model.dtype == "float32"
        self._near = EXACT if exact else ROUNDED
        self._most = None if recipe is None else recipe.rollout.max_staleness
        self._steps: dict[int, _Sum] = defaultdict(_Sum)
        self._roles: dict[str, _Sum] = defaultdict(_Sum)
        self._turns: dict[bool, _Sum] = defaultdict(_Sum)
        self._fit = _Fit()
        self._chains: list[float] = []
        self._worst: list[tuple[float, Evidence]] = []
        self._old, self._foreign = Places(), Places()
        self._tokens = 0

    async def note(self, seen: Seen) -> None:
        if seen.held_out or seen.step is None:
            return
        for chain in seen.group.trajectories:
            mine = _Sum()
            for noted in seen.credit.get(chain.id, ()):
                place = (seen.group.id, chain.id, int(noted["row"]))
                self._note_row(seen, chain.rows[noted["row"]], noted, place, mine)
            if mine.count:
                self._chains.append(mine.mean)

    def _note_row(
        self, seen: Seen, row: Row, noted: Mapping[str, Any], place: tuple[str, str, int], mine: _Sum
    ) -> None:
        assert seen.step is not None
        targets = np.asarray(noted["targets"], dtype=int)
        ages = np.full(len(row.token_ids), np.nan)
        for span in row.versions:
            version = version_of(self.record, span.version)
            if version is None:
                self._foreign.add(Evidence(f"sampled by {span.version}", *place, span.start, seen.file))
            elif not span.mixed:
                ages[span.start : span.end] = seen.step - 1 - version
            is_old = version is not None and self._most is not None and seen.step - 1 - version > self._most
            if is_old and np.any((targets >= span.start) & (targets < span.end)):
                text = f"trained at step {seen.step} and sampled by version {version}"
                self._old.add(Evidence(text, *place, span.start, seen.file))
        self._tokens += targets.size
        if "proximal" not in noted:
            return
        fresh = ages[targets] == 0
        chosen = targets[fresh]
        server = np.asarray(row.logprobs, dtype=np.float64)[chosen]
        trainer = np.asarray(noted["proximal"], dtype=np.float64)[fresh]
        gaps = trainer - server
        mine.add(gaps)
        self._steps[seen.step].add(gaps)
        unsure = (server < SURE) & (trainer < SURE)
        self._fit.add(_log_odds(server[unsure]), _log_odds(trainer[unsure]))
        roles = np.frombuffer(row.roles.ljust(len(row.token_ids), ".").encode(), "S1")[chosen]
        for name, letter in ROLES.items():
            self._roles[name].add(gaps[roles == letter.encode()])
        end = (row.turn_ends or [len(row.token_ids)])[0]
        for later in (False, True):
            self._turns[later].add(gaps[(chosen >= end) == later])
        if gaps.size:
            at = int(np.argmax(np.abs(gaps)))
            text = f"the server says {server[at]:.4f}, the trainer {trainer[at]:.4f} (step {seen.step})"
            self._worst.append((abs(float(gaps[at])), Evidence(text, *place, int(chosen[at]), seen.file)))
            self._worst = sorted(self._worst, key=lambda pair: -pair[0])[:5]

    def findings(self) -> Iterator[Finding]:
        if places := self._foreign:
            text = f"{places.total} spans were sampled by weights that this run did not publish"
            yield self.wrong(text, "let no other run push weights to this server", places.kept)
        if places := self._old:
            text = f"{places.total} spans were trained although they are older than rollout.max_staleness={self._most}"
            yield self.wrong(text, "drop what is too old before it is trained", places.kept)
        yield from self._mismatch()
        yield from self._syncs()

    def _mismatch(self) -> Iterator[Finding]:
        means = {step: sums.mean for step, sums in sorted(self._steps.items()) if sums.count}
        if not means or max(means.values()) <= self._near:
            return
        whole = _Sum(sum(s.total for s in self._steps.values()), sum(s.count for s in self._steps.values()))
        text = f"server and trainer differ by {whole.mean:.3g} nats a token, and rounding gives at most {self._near:g}"
        text += f": {self._where(means)}"
        yield self.wrong(text, self._fix(means), [evidence for _, evidence in self._worst])

    def _where(self, means: Mapping[int, float]) -> str:
        first, most = next(iter(means)), max(means, key=lambda step: means[step])
        parts = [f"{means[first]:.3g} at step {first}, {means[most]:.3g} at step {most}"]
        roles = {name: sums.mean for name, sums in self._roles.items() if sums.count}
        if roles:
            parts.append("by role " + ", ".join(f"{name} {mean:.3g}" for name, mean in roles.items()))
        if self._turns[True].count:
            parts.append(f"first turns {self._turns[False].mean:.3g}, later ones {self._turns[True].mean:.3g}")
        return "; ".join(parts)

    def _fix(self, means: Mapping[int, float]) -> str:
        slope, explained = self._fit.line()
        early = means[next(iter(means))] <= self._near
        few = max(1, len(self._chains))
        differ = sum(mean > self._near for mean in self._chains) / few
        agree = sum(mean < AGREE * self._near for mean in self._chains) / few
        some = differ > SOME and agree > SOME
        if explained > FITTED and abs(slope - 1) > FACTOR:
            return (
                f"the trainer's log-odds are {slope:.2f} times the server's: one of the two divides the logits by a "
                "temperature, or takes log-probabilities before it; use the same on both sides"
            )
        if not early and self._turns[True].count and self._turns[False].mean <= self._near:
            return "first turns agree: look at what precedes later ones, a prefix cache or another context"
        if early and some and self._turns[False].mean <= self._near:
            return "first turns agree: the server keeps the cache of older weights; drop it with each update"
        if early:
            return (
                "they agree at first: later weights do not reach the server, or it does not use them; look at the "
                "proofs of syncs (docs/servers.md)"
            )
        if some:
            return f"{differ:.0%} of the chains differ: one of several servers has other weights or settings"
        return (
            "they differ from the first step on: the server has another model, adapter, precision or attention than "
            "the trainer"
        )

    def _syncs(self) -> Iterator[Finding]:
        steps = [line for line in self.record.metrics if "sync/provable" in line]
        if not steps:
            return
        if len(steps) > 3 and not any(line["sync/provable"] for line in steps):
            text = f"none of {len(steps)} syncs could be proven: the weights change less than the server's noise"
            yield self.remark(text, "raise the learning rate, or compare a few steps with model.dtype=float32")
        moved = [float(line["sync/canary_drift"]) for line in steps if "sync/canary_drift" in line]
        rates = any(line.get("learning_rate", 0.0) > 0 for line in steps)
        if len(moved) > 3 and rates and max(moved) == 0.0:
            text = f"the weights have not changed in {len(moved)} steps"
            yield self.wrong(text, "look at the optimizer, at what requires gradients, and at the learning rate")

    def looked_at(self) -> str:
        fresh = sum(sums.count for sums in self._steps.values())
        return f"{self._tokens:,} trained tokens, {fresh:,} of the newest weights" if self._tokens else ""


def _log_odds(logprobs: np.ndarray) -> np.ndarray:
    odds: np.ndarray = logprobs - np.log1p(-np.exp(logprobs))
    return odds
