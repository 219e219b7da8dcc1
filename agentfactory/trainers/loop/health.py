"""Symptoms from which no run recovers on its own, detected by comparing each step's metrics with earlier steps'."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, log, sqrt
from statistics import fmean, median
from typing import Any

from agentfactory.base.findings import Finding, warning
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.evaluation.rules import EQUAL_STEPS, UNREADABLE, UNREADABLE_RISE, fix_equal_rewards
from agentfactory.trainers.config import Symptom

Figures = Mapping[str, Any]

WINDOW = 20
SETTLED = 4
ENTROPY_FACTOR, ENTROPY_STEPS = 2.5, 2
"""Symptom: entropy this many times above the median, or twice as many times below it, for this many steps."""
MISMATCH_FACTOR, MISMATCH_LEAST, MISMATCH_STEPS = 20.0, 0.1, 3
"""Symptom: KL(server || trainer) this many times its median and this many nats, over this many steps, while success is
no better than usual."""
SUCCESS_STEPS, SUCCESS_LEAST = 4, 0.2
"""Symptom: success, averaged over this many steps, is below half of its best average, which was at least this high; or
it is 0, and its best was at least a quarter of this. Tasks without success use the reward, if it fell by more than its
standard deviation."""
CHANCE_FACTOR = 3.5
"""Success, the share of unreadable turns and the logarithm of the entropy may differ by this many times their usual
change from a step to the next: a step has few tasks, which are not equally hard."""
UNSTABLE_FALL, UNSTABLE_LEAST, UNSTABLE_ENTROPY = 0.25, 0.1, 1.5
"""Symptom: success, averaged over SUCCESS_STEPS, is below its best (or that of the initial weights) by this share of
the best and at least by this much, while entropy is this many times its value at the best."""
CALLS_FALL = 0.5
"""Symptom: the calls of a chain are below this share of their best, while success is UNSTABLE_LEAST below its best.
Turns cut at rollout.max_tokens count as unreadable only then: calls that are too long are no lost format."""
LATE_CHAINS, LATE_TOKENS, LATE_SUCCESS = 0.05, 0.2, 0.25
"""Symptom: over SUCCESS_STEPS, this share of the chains was cancelled at the staleness bound, or this share of the
sampled tokens was too old to train, or the cancelled chains are more than this share of those that succeeded."""
CAUSE_RISE = 0.1
"""Malformed or cut turns are the cause if their share rose by this much; without any learning, if they are most."""
PAGE = "docs/troubleshooting.md, 'A run that dies'"
_PAGES = {
    Symptom.UNSTABLE: "docs/choosing-hyperparameters.md (Choosing hyperparameters), 'Reward falls'",
    Symptom.LATE_CHAINS: "docs/staleness.md (Asynchronous training), 'Late chains'",
}


def ordered_by(recipe: RolloutRecipe) -> str | None:
    """Return the setting by which later steps may have harder tasks; None if each step has a random sample."""
    for part in recipe.parts():
        if part.recipe.data is not None and not part.recipe.data.shuffle:
            return f"{part.section}.shuffle=false"
    if recipe.data is not None and recipe.data.curriculum is not None:
        return "data.curriculum"
    return None if recipe.rollout.curriculum is None else "rollout.curriculum"


@dataclass
class Health:
    """The health of a run, judged by each step's metrics in order. Each symptom is reported once, and again only after
    it was gone. `alike`: all steps have tasks of one distribution (`ordered_by`), so success that falls is a sign."""

    alike: bool = True
    _steps: deque[Figures] = field(default_factory=lambda: deque(maxlen=WINDOW + SUCCESS_STEPS))
    _best: float = 0.0
    """Highest success, or reward if there is no success, averaged over SUCCESS_STEPS."""
    _best_step: int = 0
    _best_entropy: float | None = None
    """Entropy when success was best; before that, of the first step."""
    _least: dict[str, float] = field(default_factory=dict)
    """Lowest share of malformed, cut and unreadable turns, of the first step or averaged over SUCCESS_STEPS."""
    _best_calls: float = 0.0
    """Most calls of a chain, of the first step or averaged over SUCCESS_STEPS."""
    _before: float = 0.0
    """Success of the initial weights on held-out tasks."""
    _run: dict[str, int] = field(default_factory=dict)
    """Number of consecutive steps in which each sign was present."""
    _told: set[Symptom] = field(default_factory=set)

    def note(self, figures: Figures) -> list[Finding]:
        """Check one line of metrics.jsonl and return new findings, whose topics are symptoms; skip evaluations."""
        if figures.get("step") == 0:
            self._before = figures.get("eval/sampled/success", 0.0)
        if "grad_norm" not in figures or "groups/equal_rewards" not in figures:
            return []
        if not self._steps:
            self._best_calls = figures.get(_CALLS, 0.0)
        shares = self._shares(figures)
        self._steps.append({**figures, **shares, _LOG_ENTROPY: log(max(figures.get("entropy", 0.0), 1e-9))})
        self._best_calls = max(self._best_calls, self._recent(_CALLS) or 0.0)
        for name, share in shares.items():
            least, recent = self._least.get(name, share), self._recent(name)
            self._least[name] = least if recent is None else min(least, recent)
        # in the order of Symptom: _unstable and _format use the best that _success notes
        texts: dict[Symptom, str | None] = {symptom: getattr(self, f"_{symptom}")(figures) for symptom in Symptom}
        new = [symptom for symptom, text in texts.items() if text is not None and symptom not in self._told]
        self._told = {symptom for symptom, text in texts.items() if text is not None}
        where = f"step {figures['step']}"
        told = {one: f"{where}: {texts[one]}; {self._cause(one, figures)}; see {_PAGES.get(one, PAGE)}" for one in new}
        return [warning(one, text) for one, text in told.items()]

    def _no_gradient(self, figures: Figures) -> str | None:
        # if every chain succeeds, there is nothing left to learn
        solved = figures.get("success", 0.0) == 1.0
        taught = "teacher/kl" in figures and figures.get("teacher/graded", 1.0) > 0.0
        steps = self._lasts("no gradient", figures["groups/equal_rewards"] == 1.0 and not solved and not taught)
        if steps < EQUAL_STEPS:
            return None
        return (
            f"nothing was learned in {steps} steps: in every group all chains have the same reward "
            f"({_goal(figures)} {figures[_goal(figures)]:.2g}, grad_norm {figures['grad_norm']:.2g})"
        )

    def _entropy(self, figures: Figures) -> str | None:
        entropy, usual = figures.get("entropy"), self._usual("entropy")
        if entropy is None or usual is None:
            return None
        chance = exp(self._chance(_LOG_ENTROPY))
        above = self._lasts("entropy above", entropy > max(ENTROPY_FACTOR, chance) * usual)
        # a policy that improves also becomes more certain
        fell = self._no_better(figures) and entropy < usual / max(2 * ENTROPY_FACTOR, chance)
        below = self._lasts("entropy below", fell)
        if max(above, below) < ENTROPY_STEPS:
            return None
        return f"entropy is {entropy:.3g} nats, and its median over the steps before is {usual:.3g}"

    def _mismatch(self, figures: Figures) -> str | None:
        gap, usual = figures.get("mismatch/kl"), self._usual("mismatch/kl")
        if gap is None or usual is None:
            return None
        steps = self._lasts("mismatch", gap > max(MISMATCH_LEAST, MISMATCH_FACTOR * usual))
        # near the end of learning, when gradients are small, this comes and goes
        if steps < MISMATCH_STEPS or not self._no_better(figures):
            return None
        return f"mismatch/kl is {gap:.2g} nats, and its median over the steps before is {usual:.2g}"

    def _success(self, figures: Figures) -> str | None:
        name = _goal(figures)
        level, entropy = self._recent(name), self._recent("entropy")
        if self._best_entropy is None:
            self._best_entropy = figures.get("entropy")
        if level is None:
            return None
        if level > self._best:
            self._best, self._best_step = level, figures["step"]
            if level > self._before and entropy is not None:
                self._best_entropy = entropy
        if name == "success":
            fell = self._best >= SUCCESS_LEAST or (self._best >= SUCCESS_LEAST / 4 and level == 0.0)
        else:
            # half of a negative reward is meaningless
            fell = self._best > 0 and self._best - level > max(step["reward_std"] for step in self._steps)
        if not self.alike or not fell or level >= self._best / 2 or self._best - level <= self._chance(name):
            return None
        best = f"{self._best:.2f} up to step {self._best_step}"
        return f"{name} was {level:.2f} over the last {SUCCESS_STEPS} steps, and {best}"

    def _unstable(self, figures: Figures) -> str | None:
        level, entropy, entropy_then = self._recent("success"), self._recent("entropy"), self._best_entropy
        best = max(self._best, self._before)
        if not self.alike or level is None or entropy is None or entropy_then is None or best < SUCCESS_LEAST:
            return None
        fell = level < best - max(UNSTABLE_LEAST, UNSTABLE_FALL * best, self._chance("success"))
        if not fell or entropy < UNSTABLE_ENTROPY * entropy_then:
            return None
        grew = f"entropy grew from {entropy_then:.2g} to {entropy:.2g} nats"
        return f"success fell from {best:.2f} to {level:.2f} while {grew}"

    def _format(self, figures: Figures) -> str | None:
        unreadable, malformed = self._recent(_UNREADABLE), self._recent(_MALFORMED)
        if unreadable is not None and malformed is not None:
            rise = unreadable - self._least[_UNREADABLE]
            if rise > max(UNREADABLE_RISE, self._chance(_UNREADABLE)):
                parsed = f"from {1 - self._least[_MALFORMED]:.0%} to {1 - malformed:.0%}"
                return f"the turns that could be parsed fell {parsed}; the format has been lost"
        calls, level = self._recent(_CALLS), self._recent(_goal(figures))
        if calls is None or level is None or not self.alike:
            return None
        # an agent that gets better may need fewer calls
        if calls >= CALLS_FALL * self._best_calls or level > self._best - UNSTABLE_LEAST:
            return None
        goal = f"{_goal(figures)} from {self._best:.2f} to {level:.2f}"
        return f"the calls of a chain fell from {self._best_calls:.1f} to {calls:.1f}, and {goal}"

    def _late_chains(self, figures: Figures) -> str | None:
        # a step in which no chain ended has no count of them
        last, names = list(self._steps)[-SUCCESS_STEPS:], ("cancelled/chains", "chains", "cancelled/tokens")
        cancelled, ended, tokens = (sum(step.get(name, 0.0) for step in last) for name in names)
        untrained = self._recent("staleness/untrained")
        if untrained is not None and untrained > LATE_TOKENS:
            return f"{untrained:.0%} of the sampled tokens of the last {SUCCESS_STEPS} steps were too old to train"
        if len(last) < SUCCESS_STEPS or not cancelled:
            return None
        share, success = cancelled / (cancelled + ended), self._recent("success")
        # a tenth of the chains is little where nine in ten succeed, and everything where one in ten does
        if share <= LATE_CHAINS and (success is None or share <= LATE_SUCCESS * success):
            return None
        most = self._recent("started/success_most")
        told = "" if most is None or success is None else f": success is {success:.2f}, and with them up to {most:.2f}"
        return (
            f"{share:.0%} of the chains of the last {SUCCESS_STEPS} steps were cancelled at rollout.max_staleness, "
            f"after {tokens / cancelled:.0f} tokens on average, and the trained ones are those that were faster{told}"
        )

    def _shares(self, figures: Figures) -> dict[str, float]:
        """Return the shares of the turns that were malformed, that were cut at rollout.max_tokens, and that show no
        format: the malformed ones, without those that were cut if chains still call their tools."""
        turns, calls = figures.get("turns"), figures.get(_CALLS, 0.0)
        if not turns:
            return {}
        malformed = figures.get("trajectory/tool_errors/malformed_call", 0.0)
        cut = figures.get("trajectory/truncated_turns", 0.0)
        unreadable = max(malformed - cut, 0.0) if calls >= CALLS_FALL * self._best_calls else malformed
        return {_MALFORMED: malformed / turns, _CUT: cut / turns, _UNREADABLE: unreadable / turns}

    def _cause(self, symptom: Symptom, figures: Figures) -> str:
        turns, last = figures.get("turns", 0.0), self._steps[-1]
        if symptom is Symptom.LATE_CHAINS:
            return "fix: a higher rollout.max_staleness, or rollout.late_chains=wait"
        counts = (last.get(name, 0) * turns for name in (_MALFORMED, _CUT))
        malformed, cut = (f"{count:.1f} of {turns:.1f} turns a chain" for count in counts)
        causes = []
        if self._has_risen(_UNREADABLE) and symptom is not Symptom.FORMAT:
            change = self._change(_MALFORMED)
            causes.append(f"the format has been lost: the calls of {malformed} cannot be read ({change})")
        if self._has_risen(_CUT):
            causes.append(f"{cut} are cut at rollout.max_tokens ({self._change(_CUT)})")
        if causes:
            return ", and ".join(causes)
        if figures.get("staleness/max", 0) > 0 and figures.get("mismatch/kl", 0.0) > MISMATCH_LEAST:
            return "the data is too stale for such updates: lower train.learning_rate or rollout.max_staleness"
        if symptom is Symptom.NO_GRADIENT:
            if max(last.get(_MALFORMED, 0.0), last.get(_CUT, 0.0)) > UNREADABLE:
                return f"the calls of {malformed} cannot be read, and {cut} are cut at rollout.max_tokens"
            alike = figures.get("reward_std") == 0.0
            return f"fix: {fix_equal_rewards(figures['reward'] if alike else None)}; read trajectories"
        cause = f"a likely cause is train.learning_rate, {figures.get('learning_rate', 0.0):.2g}"
        return f"{cause}, or a reward that pays for this" if symptom is Symptom.FORMAT else cause

    def _has_risen(self, share: str) -> bool:
        return self._steps[-1].get(share, 0.0) - self._least.get(share, 0.0) > CAUSE_RISE

    def _change(self, share: str) -> str:
        return f"{self._steps[-1][share]:.0%}, and {self._least[share]:.0%} before"

    def _recent(self, name: str) -> float | None:
        values = [step[name] for step in list(self._steps)[-SUCCESS_STEPS:] if name in step]
        return fmean(values) if len(values) == SUCCESS_STEPS else None

    def _chance(self, name: str) -> float:
        """Return by how much a metric may differ by chance: by its changes between steps, without the largest."""
        values = [step[name] for step in self._steps if name in step]
        changes = sorted((after - before) ** 2 for before, after in pairwise(values))[:-1]
        return CHANCE_FACTOR * sqrt(fmean(changes)) if changes else 0.0

    def _usual(self, name: str) -> float | None:
        """Return the median of a metric over earlier steps, also those with signs: a lasting change becomes usual."""
        values = [step[name] for step in list(self._steps)[-WINDOW - 1 : -1] if name in step]
        return median(values) if len(values) >= SETTLED else None

    def _no_better(self, figures: Figures) -> bool:
        name = _goal(figures)
        usual = self._usual(name)
        return usual is None or figures[name] <= usual

    def _lasts(self, sign: str, there: bool) -> int:
        self._run[sign] = self._run.get(sign, 0) + 1 if there else 0
        return self._run[sign]


_MALFORMED, _CUT, _UNREADABLE, _LOG_ENTROPY = "malformed", "cut", "unreadable", "log entropy"
_CALLS = "trajectory/tool_calls"


def _goal(figures: Figures) -> str:
    return "success" if "success" in figures else "reward"
