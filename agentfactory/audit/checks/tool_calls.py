"""Tool calls: never made, failed, unanswered, repeated."""

import json
from collections import Counter
from collections.abc import Iterator

from agentfactory.audit.check import Check, Parts
from agentfactory.audit.finding import Evidence, Finding, Places
from agentfactory.audit.record import CALLS, MESSAGES, Record, Seen
from agentfactory.audit.replay.saved_turns import own_messages
from agentfactory.base.messages import text_of
from agentfactory.rollout.trajectory import Outcome, Trajectory

ENOUGH_CHAINS, ENOUGH_CALLS = 64, 32
_CUT = (Outcome.MAX_TOKENS, Outcome.CONTEXT_OVERFLOW)
MANY, MOST = 0.2, 0.5
"""Shares of calls that repeat one that failed; that fail, or get the same answer."""


class ToolCallCheck(Check):
    """Tools that are offered should be called, calls should be answered, and their answers should differ."""

    topic = "tool calls"
    needs = (MESSAGES, CALLS)

    def __init__(self, record: Record, parts: Parts) -> None:
        super().__init__(record, parts)
        self._offered: dict[str, set[str]] = {}
        for (_, source), part in parts.items():
            self._offered.setdefault(source, set()).update(spec.name for spec in part.specs)
        self._chains: Counter[str] = Counter()
        self._without: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._by_source: dict[str, Counter[str]] = {}
        self._errors: Counter[str] = Counter()
        self._answers: dict[str, Counter[str]] = {}
        self._arguments: dict[str, set[str]] = {}
        self._unanswered, self._unoffered = Places(), Places()
        self._repeats = self._after_error = 0
        self._first: dict[str, Evidence] = {}

    async def note(self, seen: Seen) -> None:
        """See Check."""
        for chain in seen.group.trajectories if not seen.held_out else ():
            if chain.outcome.failed:
                continue
            source = seen.group.source
            if chain.outcome in _CUT and not chain.metrics.get("tool_calls"):
                continue  # it was cut before it could call one
            self._chains[source] += 1
            for name in (name for name in chain.metrics if name.startswith("tool/") and name.endswith("/calls")):
                self._offered.setdefault(source, set()).add(name.split("/")[1])
            if not self._note_calls(seen, chain):
                self._without[source] += 1

    def _note_calls(self, seen: Seen, chain: Trajectory) -> int:
        source, made = seen.group.source, 0
        answers = {m.get("tool_call_id"): m for m in chain.messages if m["role"] == "tool" and m.get("tool_call_id")}
        last, failed_before = len(chain.messages) - 1, ""
        # a task may begin with calls of its own
        own = {*own_messages(chain)}
        for index, message in enumerate(chain.messages):
            for call in message.get("tool_calls") or [] if index in own else []:
                name, arguments = call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True)
                made += 1
                self._calls[name] += 1
                self._by_source.setdefault(source, Counter())[name] += 1
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
        return made

    def findings(self) -> Iterator[Finding]:
        """See Check."""
        for source, offered in self._offered.items():
            chains, of = self._chains[source], f" of source {source}" if source else ""
            called = self._by_source.get(source, Counter())
            if chains < ENOUGH_CHAINS or not offered:
                continue
            if not called:
                text = f"no chain of {chains:,}{of} called a tool, though {', '.join(sorted(offered)[:4])} are offered"
                fix = "compare the model's texts with the format that rollout.parser reads (docs/first-look.md)"
                yield self.warning(text, fix)
            elif never := sorted(offered - called.keys()):
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

    @property
    def looked_at(self) -> str:
        """See Check."""
        return f"{self._calls.total():,} calls" if self._chains else ""
