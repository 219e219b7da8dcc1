"""Chains that were lost, by cause."""

from collections import Counter
from collections.abc import Iterator

from agentfactory.audit.check import Check, Parts
from agentfactory.audit.finding import Evidence, Finding
from agentfactory.audit.record import OUTCOMES, Record, Seen
from agentfactory.rollout.trajectory import Outcome

FEW, MOST = 0.05, 0.5
"""Shares of chains that failed, or were cut, beyond which there is a warning; beyond which a run trains on a rest."""
_LIMITS = (Outcome.MAX_TOKENS, Outcome.CONTEXT_OVERFLOW, Outcome.MAX_TURNS, Outcome.TOOL_LIMIT)
_FIXES = {
    Outcome.MAX_TOKENS: "raise rollout.max_tokens, or ask for short answers",
    Outcome.CONTEXT_OVERFLOW: "raise rollout.max_total_tokens and server.max_model_len, or set rollout.context",
    Outcome.MAX_TURNS: "raise rollout.max_turns, or tell the model how many turns it has",
    Outcome.TOOL_LIMIT: "raise the limit in `limits` that ended them",
    Outcome.TIMEOUT: "raise rollout.timeout_seconds, or find what is slow in the chains' times",
    Outcome.TOOL_INFRASTRUCTURE: "repair the tool server; its own output is in the log",
    Outcome.INFERENCE_ERROR: "look at logs/server.log",
    Outcome.REWARD_ERROR: "repair the reward, and try it with `agentfactory tools check RECIPE`",
    Outcome.AGENT_ERROR: "repair the agent; its own output is in the log",
    Outcome.CANCELLED: "raise rollout.max_staleness, or make chains shorter: the longest are cancelled",
}


class OutcomeCheck(Check):
    """Few chains may fail or be cut, because those that are left are not a fair sample of the policy."""

    topic = "chains lost"
    needs = (OUTCOMES,)

    def __init__(self, record: Record, parts: Parts) -> None:
        super().__init__(record, parts)
        self._chains = 0
        self._ends: Counter[Outcome] = Counter()
        self._errors: dict[Outcome, Counter[str]] = {}
        self._first: dict[tuple[Outcome, str], Evidence] = {}

    async def note(self, seen: Seen) -> None:
        """See Check."""
        for chain in seen.group.trajectories if not seen.held_out else ():
            self._chains += 1
            if chain.outcome is Outcome.COMPLETED:
                continue
            self._ends[chain.outcome] += 1
            error = (chain.error or str(chain.stop_reason or "")).splitlines()[:1]
            text = _alike(error[0]) if error else ""
            self._errors.setdefault(chain.outcome, Counter())[text] += 1
            place = Evidence(chain.error or text, seen.group.id, chain.id, file=seen.file)
            self._first.setdefault((chain.outcome, text), place)

    def findings(self) -> Iterator[Finding]:
        """See Check."""
        for outcome, count in self._ends.most_common():
            share = count / self._chains
            if share < FEW and not (outcome is Outcome.REWARD_ERROR and count > 1):
                continue
            text, fix = f"{count:,} of {self._chains:,} chains ({share:.0%}) ended as {outcome}", _FIXES[outcome]
            errors = self._errors[outcome].most_common(3)
            places = [self._first[outcome, error] for error, _ in errors]
            if outcome in _LIMITS and share < MOST:
                # a limit may be part of the task
                yield self.remark(text, fix, places)
            else:
                yield self.warning(text, fix, places)

    @property
    def looked_at(self) -> str:
        """See Check."""
        return f"the ends of {self._chains:,} chains" if self._chains else ""


def _alike(error: str) -> str:
    """Return an error without its numbers, so that equal causes are counted together."""
    return "".join("0" if char.isdigit() else char for char in error)[:200]
