"""A mutation fuzzer of the corpus: every mutant works or is named, without an exception of a library, and not silently.

`python -m tests.tools.roughness.fuzz --seconds 3600` runs for an hour, and prints what it found.
"""

import argparse
import asyncio
import json
import time
import traceback
from collections import Counter
from typing import Any

from jsonschema.validators import validator_for
from mcp_types import CallToolResult
from pydantic import ValidationError

from agentfactory.base.messages import ToolCall, ToolInfrastructureError, ToolResult, properties_of
from agentfactory.commands.tools_command import signature_of
from agentfactory.commands.tried_servers import _example
from agentfactory.rollout.text.parsers.parser import describe, parameter_schema, sole_parameter
from agentfactory.rollout.text.parsers.values import convert
from agentfactory.tools.calls.argument_check import ArgumentCheck, fits_plainly
from tests.mutants import JUNK, Mutants, keys_of
from tests.tools.roughness.answers import ANSWERS
from tests.tools.roughness.raw_server import ID
from tests.tools.roughness.schemas import SCHEMAS
from tests.tools.roughness.serving import opened, plan_of, tool_of

SECONDS = 0.1
"""Time limit of a call whose answer cannot be assigned to it."""


class Fuzzer:
    """Tries mutants of the corpus. `found` counts the outcomes, `faults` are the broken promises."""

    def __init__(self, seed: int) -> None:
        words = sorted({key for case in SCHEMAS for key in keys_of(case.schema)})
        pieces = ("", '"', "\\", "{", "]", "\\ud800", "\udcff", "\0", "null", "1e999", ID)
        self.mutants = Mutants(seed, words, [*JUNK, "$ID"], pieces)
        self.random = self.mutants.random
        self.found: Counter[str] = Counter()
        self.faults: list[str] = []

    async def step(self) -> None:
        case = self.random.choice(SCHEMAS)
        schema = self.mutants.of(case.schema)
        await self._try("schema", schema, self._schema(schema, self.mutants.of(case.passes)))
        answer = self.random.choice(ANSWERS).text
        answer = self.mutants.torn(answer) if self.random.random() < 0.3 else self._mutant_text(answer)
        await self._try("answer", answer, self._answer(answer))

    async def _try(self, kind: str, mutant: Any, attempt: Any) -> None:
        try:
            self.found[f"{kind}: {await attempt}"] += 1
        except Exception:
            self.faults.append(f"{kind} {mutant!r}\n{traceback.format_exc()}")
            self.found[f"{kind}: FAULT"] += 1

    async def _schema(self, schema: Any, arguments: Any) -> str:
        plan = plan_of([tool_of("t", schema), tool_of("plain", {"type": "object"})])
        sent = plan["tools"][0]["inputSchema"]
        async with opened(plan) as (toolset, notices):
            spec = toolset.specs[0]
            shown = json.dumps(sent).encode("ascii").decode()
            if isinstance(sent, dict) and "\\ud800" not in shown:
                assert json.dumps(spec.parameters) == shown, "the model sees another schema"
            signature_of(spec)
            _example(spec.parameters, spec.parameters, "word")
            describe([spec])
            sole_parameter(spec)
            for name in properties_of(spec.parameters):
                convert("5", parameter_schema(spec, name), spec.parameters)
            async with toolset.chain("a", {}) as session:
                arguments = arguments if isinstance(arguments, dict) else {}
                result = await session.call(ToolCall("1", "t", arguments))
                if fits_plainly(arguments, spec.parameters):
                    assert ArgumentCheck(spec.parameters).fault(arguments) is None
                assert (await session.call(ToolCall("2", "plain", {}))).content == "{}"
        if _is_wrong(sent):
            assert notices, "a schema that is wrong, and no notice"
        _check_texts([str(notice) for notice in notices], result)
        return f"{result.error or 'called'}{', named' if notices else ''}"

    async def _answer(self, answer: str) -> str:
        plan = plan_of([tool_of("t", {"type": "object"})])
        plan["answers"] = {"t": answer}
        async with opened(plan, timeout_seconds=SECONDS) as (toolset, notices), toolset.chain("a", {}) as session:
            try:
                result = await session.call(ToolCall("1", "t", {}))
            except ToolInfrastructureError as error:
                lost = str(error)
            else:
                lost = ""
        if lost:
            assert lost.startswith("tool server raw"), lost
            assert "died" not in lost, lost  # the server lives
            return "chain lost, named"
        if result.error is None and not notices and (wrong := _refused(answer)):
            assert result.content, f"read as nothing, and no notice: {wrong}"
        _check_texts([str(notice) for notice in notices], result)
        return f"{result.error or 'read'}{', named' if notices else ''}"

    def _mutant_text(self, text: str) -> str:
        try:
            message = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            return self.mutants.torn(text)
        part = self.random.choice(("result", "error"))
        if not isinstance(message, dict) or part not in message or self.random.random() < 0.1:
            return json.dumps(self.mutants.of(message))
        return json.dumps(message | {part: self.mutants.of(message[part])})


def _is_wrong(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return True
    plain = {key: value for key, value in schema.items() if key != "$schema"}
    kind = validator_for({})
    try:
        found = kind(kind.META_SCHEMA).iter_errors(plain)
        errors = [[*error.absolute_path] for error in found if error.validator != "uniqueItems"]
    except Exception:  # jsonschema itself
        return False
    if "$schema" in schema:
        return False
    return any(len(path) == 1 and path[0] in kind.VALIDATORS for path in errors)


def _refused(answer: str) -> str:
    """Return why the SDK would refuse the result in an answer; empty if it would not."""
    try:
        message = json.loads(answer, strict=False)
        result = message["result"]
        if result.get("content") == [] or "structuredContent" in result:
            return ""
        CallToolResult.model_validate(result, by_name=False)
    except ValidationError as error:
        return str(error)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ""
    return ""


def _check_texts(notices: list[str], result: ToolResult) -> None:
    for text in [*notices, str(result.content)]:
        assert "pydantic.dev" not in text, text
        assert "Traceback" not in text, text
    for notice in notices:
        assert notice.startswith("tool server raw"), notice
    json.dumps(result.content, ensure_ascii=False).encode()


async def fuzz(seed: int, seconds: float, steps: int | None = None) -> Fuzzer:
    fuzzer, until = Fuzzer(seed), time.monotonic() + seconds
    done = 0
    while time.monotonic() < until if steps is None else done < steps:
        await fuzzer.step()
        done += 1
    return fuzzer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
    options = parser.parse_args()
    ended = asyncio.run(fuzz(options.seed, options.seconds))
    for fault in ended.faults[:20]:
        print(fault)
    print(f"seed {options.seed}: {sum(ended.found.values())} mutants, {len(ended.faults)} faults")
    for outcome, count in ended.found.most_common():
        print(f"{count:8} {outcome}")
    raise SystemExit(bool(ended.faults))
