"""The figures in metrics.jsonl, against the chains and against themselves."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

from agentfactory.audit.check import Check, differ
from agentfactory.audit.record import METRICS, TRAINED, Places, Seen
from agentfactory.base.findings import Evidence, Finding
from agentfactory.rollout.groups.group_filter import counted
from agentfactory.trainers.loop.health import Health, ordered_by


class MetricCheck(Check):
    """Steps must follow one another, figures be numbers, and a step's reward that of the chains that it trained."""

    topic = "metrics"
    needs = (METRICS,)

    def begin(self) -> None:
        self._rewards: dict[int, list[float]] = defaultdict(list)
        self._groups: Counter[int] = Counter()
        self._held_out: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._steps = [line for line in self.record.metrics if "grad_norm" in line]

    async def note(self, seen: Seen) -> None:
        if seen.held_out and seen.step is not None and seen.file.startswith("trajectories/eval/"):
            found = self._held_out[seen.step, seen.held_out]
            for chain in seen.group.trajectories:
                if not chain.outcome.failed and chain.reward is not None:
                    found["reward"].append(chain.reward)
                    found["success"] += [chain.metrics["success"]] if "success" in chain.metrics else []
        recipe = self.record.recipe
        if seen.held_out or seen.step is None or recipe is None or TRAINED in self.record.lacks:
            return
        self._groups[seen.step] += 1
        chains = counted(seen.group.trajectories, recipe.rollout)
        self._rewards[seen.step] += [chain.reward for chain in chains if chain.reward is not None]

    def findings(self) -> Iterator[Finding]:
        numbers = [line["step"] for line in self._steps if "step" in line]
        jumps = [(before, after) for before, after in pairwise(numbers) if after != before + 1]
        if jumps:
            before, after = jumps[0]
            text = f"step {after} follows step {before}, and {len(jumps)} such places in all"
            yield self.wrong(text, "each step must be logged once: look at how the run was continued")
        for name in ("loss", "grad_norm", "reward", "entropy"):
            bad = [line["step"] for line in self._steps if not math.isfinite(line.get(name) or 0.0)]
            if bad:
                text = f"{name} is not a number in {len(bad)} steps, first in step {bad[0]}"
                yield self.wrong(text, "continue from the checkpoint before it, with a lower learning rate")
        yield from self._compare()
        yield from self._compare_held_out()
        # a flat run shows no symptom until it has learned something
        recipe = self.record.recipe
        health = Health(alike=recipe is not None and ordered_by(recipe) is None)
        for line in self.record.metrics:
            for symptom in health.note(line):
                yield self.warning(f"{symptom.topic}: {symptom.text}", "read the page that it names")
        still = [line for line in self._steps if line.get("grad_norm") == 0.0]
        if len(self._steps) > 3 and len(still) == len(self._steps):
            yield self.wrong(
                f"the gradient is 0 in all {len(still)} steps",
                "look at the mask, at the advantages, and at what requires gradients",
            )

    def _compare(self) -> Iterator[Finding]:
        places = Places()
        for line in self._steps:
            rewards = self._rewards.get(line.get("step", 0))
            # the last group of a running run may not be saved yet
            if not rewards or "reward" not in line or self._groups[line["step"]] < self.record.trained[line["step"]]:
                continue
            mean = math.fsum(rewards) / len(rewards)
            if differ(mean, line["reward"]):
                text = f"step {line['step']} reports {line['reward']:.6g}; its {len(rewards)} chains have {mean:.6g}"
                places.add(Evidence(text, file="metrics.jsonl"))
        if places:
            text = f"{places.total} steps report another reward than their chains have"
            yield self.wrong(text, "compare the chains that are trained with those that are counted", places.kept)

    def _compare_held_out(self) -> Iterator[Finding]:
        """Compare the evaluations that training logged with their chains, and the summary with both."""
        places, last = Places(), max((step for step, _ in self._held_out), default=0)
        for line in self.record.metrics:
            for (step, mode), figures in self._held_out.items():
                for name, values in figures.items():
                    logged = line.get(f"eval/{mode}/{name}")
                    if line.get("step") != step or logged is None or not values:
                        continue
                    mean = math.fsum(values) / len(values)
                    if differ(mean, logged):
                        text = f"step {step}, {mode}: {name} {logged:.6g}, and its {len(values)} chains have {mean:.6g}"
                        places.add(Evidence(text, file="metrics.jsonl"))
        summary, chains = self.record.summary, self._held_out.get((last, "sampled"), {}).get("success")
        after = summary.get("success_after") if summary.get("evaluated_step") == last else None
        if chains and after is not None and differ(mean := math.fsum(chains) / len(chains), after):
            text = f"success_after {after:.6g}, and {len(chains)} chains of step {last} have {mean:.6g}"
            places.add(Evidence(text, file="summary.json"))
        if places:
            text = f"{places.total} figures of held-out tasks are not those of their chains"
            yield self.wrong(text, "compare the chains that were evaluated with those that are saved", places.kept)
        reached, planned = max((line["step"] for line in self._steps), default=0), summary.get("steps")
        if summary.get("status") == "completed" and planned and self._steps and planned != reached:
            text = f"summary.json has {planned} steps, and metrics.jsonl ends with step {reached}"
            yield self.wrong(text, "copy the run folder again: metrics.jsonl is not whole")

    def looked_at(self) -> str:
        compared = f", the rewards of {len(self._rewards)} compared with their chains" if self._rewards else ""
        return f"{len(self._steps):,} steps{compared}" if self._steps else ""
