"""Check tool calls (never made, failed, unanswered, repeated), outcomes, and unreadable turns."""

import json
from collections import Counter
from collections.abc import Iterator

from agentfactory.audit.check import Check
from agentfactory.audit.record import CALLS, MALFORMED, MESSAGES, OUTCOMES, Places, Seen
from agentfactory.audit.replay.replay_runner import own_messages
from agentfactory.base.findings import Evidence, Finding
from agentfactory.base.messages import text_of
from agentfactory.rollout.chains.outcome_warnings import FIXES, SHARE
from agentfactory.rollout.evaluation import rules
from agentfactory.rollout.evaluation.rules import UNREADABLE, fix_unreadable
from agentfactory.rollout.trajectory import Outcome, Trajectory

ENOUGH_CALLS = 32
_CUT = (Outcome.MAX_TOKENS, Outcome.CONTEXT_OVERFLOW)
MANY, MOST = 0.2, 0.5
"""Share of calls that repeat one that failed; share of calls that fail, and of chains that were cut at a limit."""


class ToolCallCheck(Check):
    """Tools that are offered should be called, calls should be answered, and their answers should differ."""

    topic = "tool calls"
    needs = (MESSAGES, CALLS)

    def begin(self) -> None:
        self._offered: dict[str, set[str]] = {}
        for (_, source), part in self.parts.items():
            self._offered.setdefault(source, set()).update(spec.name for spec in part.specs)
        self._chains: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._called: dict[str, set[str]] = {}
        self._errors: Counter[str] = Counter()
        self._answers: dict[str, Counter[str]] = {}
        self._arguments: dict[str, set[str]] = {}
        self._unanswered = Places()
        self._repeats = self._after_error = 0
        self._first: dict[str, Evidence] = {}

    async def note(self, seen: Seen) -> None:
        for chain in seen.group.trajectories if not seen.held_out else ():
            if chain.outcome.failed:
                continue
            source = seen.group.source
            if chain.outcome in _CUT and not chain.metrics.get("tool_calls"):
                continue  # it was cut before it could call one
            self._chains[source] += 1
            for name in (name for name in chain.metrics if name.startswith("tool/") and name.endswith("/calls")):
                self._offered.setdefault(source, set()).add(name.split("/")[1])
                if chain.metrics[name]:  # in some formats, calls are text of the messages
                    self._called.setdefault(source, set()).add(name.split("/")[1])
            self._note_calls(seen, chain)

    def _note_calls(self, seen: Seen, chain: Trajectory) -> None:
        source = seen.group.source
        answers = {m.get("tool_call_id"): m for m in chain.messages if m["role"] == "tool" and m.get("tool_call_id")}
        last, failed_before = len(chain.messages) - 1, ""
        # a task may begin with calls of its own
        own = {*own_messages(chain)}
        for index, message in enumerate(chain.messages):
            for call in message.get("tool_calls") or [] if index in own else []:
                name, arguments = call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True)
                self._calls[name] += 1
                self._called.setdefault(source, set()).add(name)
                self._arguments.setdefault(name, set())
                if len(self._arguments[name]) < ENOUGH_CALLS:
                    self._arguments[name].add(arguments)
                if failed_before:
                    self._after_error += 1
                    self._repeats += failed_before == f"{name} {arguments}"
                answer = answers.get(call.get("id"))
                failed_before = ""
                if answer is None:
                    if answers and index < last - 1:
                        text = f"{name} {arguments[:80]} has no answer, and the chain continues"
                        self._unanswered.add(Evidence(text, seen.group.id, chain.id, file=seen.file))
                    continue
                text = text_of(answer.get("content") or "")
                self._answers.setdefault(name, Counter())[text[:200]] += 1
                self._first.setdefault(name, Evidence(text[:200], seen.group.id, chain.id, file=seen.file))
                if any(error.startswith(f"{name}: ") and error[len(name) + 2 :] == text for error in chain.errors):
                    self._errors[name] += 1
                    failed_before = f"{name} {arguments}"

    def findings(self) -> Iterator[Finding]:
        for source, offered in self._offered.items():
            chains, of = self._chains[source], f" of source {source}" if source else ""
            called = self._called.get(source, set[str]())
            if chains < rules.ENOUGH_CHAINS or not offered:
                continue
            if not called:
                text = f"no chain of {chains:,}{of} called a tool, though {rules.offered(sorted(offered))}"
                fix = "compare the model's texts with the format that rollout.parser reads (docs/first-look.md)"
                yield self.warning(text, fix)
            elif never := sorted(offered - called):
                text = f"no chain of {chains:,}{of} called {' or '.join(never[:8])}, of {len(offered)} tools"
                yield self.remark(text, "remove what the task does not need, or show its use")
        for name, count in self._calls.items():
            failed = self._errors[name]
            if count >= ENOUGH_CALLS and failed > MOST * count:
                text = f"{failed:,} of {count:,} calls of {name} failed"
                yield self.warning(text, "try it with `agentfactory tools call RECIPE`", [self._first[name]])
            given = self._answers.get(name, Counter())
            (most, times) = given.most_common(1)[0] if given else ("", 0)
            alone = len(self._arguments[name]) >= ENOUGH_CALLS and times == given.total()
            if alone and given.total() >= ENOUGH_CALLS:
                text = f"all {times:,} calls of {name} got the same answer, {most[:80]!r}"
                yield self.warning(text, "try it with `agentfactory tools call RECIPE`", [self._first[name]])
        if places := self._unanswered:
            text = f"{places.total} calls have no answer, though their chains continue: they were never made"
            yield self.wrong(text, "make each call that the model writes, or tell it why not", places.kept)
        if self._after_error >= ENOUGH_CALLS and self._repeats > MANY * self._after_error:
            text = (
                f"{self._repeats:,} of {self._after_error:,} calls after a failed one repeat it: its error is ignored"
            )
            yield self.remark(text, "say in the error what would work")

    def looked_at(self) -> str:
        return f"{self._calls.total():,} calls" if self._chains else ""


_LIMITS = (Outcome.MAX_TOKENS, Outcome.CONTEXT_OVERFLOW, Outcome.MAX_TURNS, Outcome.TOOL_LIMIT)


class OutcomeCheck(Check):
    """Few chains may fail or be cut, because those that are left are not a fair sample of the policy."""

    topic = "chains lost"
    needs = (OUTCOMES,)

    def begin(self) -> None:
        self._chains = 0
        self._ends: Counter[Outcome] = Counter()
        self._errors: dict[Outcome, Counter[str]] = {}
        self._first: dict[tuple[Outcome, str], Evidence] = {}

    async def note(self, seen: Seen) -> None:
        for chain in seen.group.trajectories if not seen.held_out else ():
            self._chains += 1
            if chain.outcome is Outcome.COMPLETED:
                continue
            self._ends[chain.outcome] += 1
            error = (chain.error or str(chain.stop_reason or "")).splitlines()[:1]
            # equal causes are counted together, whatever their numbers
            text = "".join("0" if char.isdigit() else char for char in "".join(error))[:200]
            self._errors.setdefault(chain.outcome, Counter())[text] += 1
            place = Evidence(chain.error or text, seen.group.id, chain.id, file=seen.file)
            self._first.setdefault((chain.outcome, text), place)

    def findings(self) -> Iterator[Finding]:
        for outcome, count in self._ends.most_common():
            share = count / self._chains
            if share < SHARE and not (outcome is Outcome.REWARD_ERROR and count > 1):
                continue
            text, fix = f"{count:,} of {self._chains:,} chains ({share:.0%}) ended as {outcome}", FIXES[outcome]
            errors = self._errors[outcome].most_common(3)
            places = [self._first[outcome, error] for error, _ in errors]
            if outcome in _LIMITS and share < MOST:
                # a limit may be part of the task
                yield self.remark(text, fix, places)
            else:
                yield self.warning(text, fix, places)

    def looked_at(self) -> str:
        return f"the ends of {self._chains:,} chains" if self._chains else ""


ENOUGH_TURNS = 200


class FormatCheck(Check):
    """The tool-call format must be able to read most turns; MetricCheck tells if fewer are read than before."""

    topic = "format"
    needs = (MALFORMED,)

    def begin(self) -> None:
        self._turns = 0
        self._malformed = Places()

    async def note(self, seen: Seen) -> None:
        for chain in seen.group.trajectories if not seen.held_out else ():
            self._turns += chain.turns
            for turn in chain.malformed_turns:
                text = f"turn {turn + 1}: {chain.errors[0] if chain.errors else ''}"
                self._malformed.add(Evidence(text[:200], seen.group.id, chain.id, file=seen.file))

    def findings(self) -> Iterator[Finding]:
        places = self._malformed
        if self._turns >= ENOUGH_TURNS and places.total > UNREADABLE * self._turns:
            text = f"most turns cannot be read: {places.total:,} of {self._turns:,} ({places.total / self._turns:.0%})"
            yield self.warning(text, fix_unreadable(), places.kept)

    def looked_at(self) -> str:
        return f"{self._turns:,} turns" if self._turns else ""
