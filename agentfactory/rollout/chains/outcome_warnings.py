"""Warnings about frequent bad outcomes: chains that failed, are dropped, or overflow the context."""

import logging
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from agentfactory.base.run_notices import notify
from agentfactory.rollout.config import RolloutConfig
from agentfactory.rollout.trajectory import Outcome, Trajectory

logger = logging.getLogger(__name__)

RECENT = 128
"""Number of most recently ended chains over which shares are computed."""
SHARE, LEAST = 0.05, 4
"""Share of the chains from which on there is a finding about their outcome, and their minimum number."""
FIXES = {
    Outcome.MAX_TOKENS: "raise rollout.max_tokens, or ask for short answers",
    Outcome.CONTEXT_OVERFLOW: "raise rollout.max_total_tokens and server.max_model_len, or set rollout.context",
    Outcome.MAX_TURNS: "raise rollout.max_turns, or tell the model how many turns it has",
    Outcome.TOOL_LIMIT: "raise the limit in `limits` that ended them",
    Outcome.TIMEOUT: "raise rollout.timeout_seconds, or find what is slow in the chains' times",
    Outcome.TOOL_INFRASTRUCTURE: "repair the tool server; its own output is in the log",
    Outcome.INFERENCE_ERROR: "look at logs/server.log",
    Outcome.REWARD_ERROR: "repair the reward, and try it with `agentfactory tools check RECIPE`",
    Outcome.AGENT_ERROR: "repair the agent; its own output is in the log",
    Outcome.USER_ERROR: "repair the simulated user (rollout.user), or its model's server",
    Outcome.CANCELLED: "raise rollout.max_staleness, or make chains shorter: the longest are cancelled",
}
"""Fixes of outcomes, also for the audit of a saved run."""


@dataclass
class ChainOutcomes:
    """The outcomes of a run's chains, those of `source` if the recipe has several."""

    config: RolloutConfig
    source: str = ""
    _ended: int = 0
    _counts: Counter[Outcome] = field(default_factory=Counter)
    _errors: dict[Outcome, Counter[tuple[str, str]]] = field(default_factory=lambda: defaultdict(Counter))
    _recent: deque[Outcome] = field(default_factory=lambda: deque(maxlen=RECENT))
    _told: set[Outcome] = field(default_factory=set)

    def note(self, chain: Trajectory) -> None:
        """Count a chain. Warn if too many ended with its outcome; further ones update the counts in the warning."""
        outcome = chain.outcome
        self._ended += 1
        self._recent.append(outcome)
        lost = outcome.failed or not self.config.outcome_policy(outcome).scored
        if not lost and outcome is not Outcome.CONTEXT_OVERFLOW:
            return
        self._counts[outcome] += 1
        self._errors[outcome][outcome.value, chain.error or ""] += 1
        if self._recent.count(outcome) >= max(LEAST, SHARE * len(self._recent)):
            self._told.add(outcome)
        if outcome in self._told:
            text = commonest_ending(self._errors[outcome], self._ended)
            fate = "; they are not trained" if lost else ""
            fix = f"; fix: {FIXES[outcome]}" if outcome in FIXES else ""
            of = f"source {self.source}: " if self.source else ""
            notify(logger, f"{of}chains that end as {outcome}", f"{of}{text}{fate}{fix}", times=0)


def commonest_ending(endings: Counter[tuple[str, str]], chains: int) -> str:
    """Describe the most frequent (outcome, error) in `endings`, those of some of `chains` chains."""
    outcomes: Counter[str] = Counter()
    for (outcome, _), count in endings.items():
        outcomes[outcome] += count
    [(most, ended)] = outcomes.most_common(1)
    error = max((found for found in endings if found[0] == most), key=endings.__getitem__)[1]
    line = " ".join(error.split())
    # an error may contain a whole page from a server
    such = f", such as: {line if len(line) <= 300 else line[:297] + '...'}" if line else ""
    return f"{ended} of {chains} chains ended as {most}{such}"
