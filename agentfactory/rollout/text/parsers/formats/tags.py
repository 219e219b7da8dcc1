"""Tags, as in Search-R1 (Jin et al., 2025, arXiv:2503.09516): `<search>query</search>` calls the tool `search` with its
single argument; `<answer>...</answer>` is the final answer."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolSpec, properties_of
from agentfactory.rollout.text.parsers import Arguments, Call, FormatError, Parser, Reading
from agentfactory.rollout.text.parsers.blocks import join_parts
from agentfactory.rollout.text.parsers.parser import find_spec, sole_parameter
from agentfactory.rollout.text.parsers.values import convert, whole_object

ANSWER, RESULT = "answer", "information"


class Tags(Parser):
    """A format with tools' names as tags. The body is the only argument, or a JSON object of all arguments. Other tags
    are ordinary text."""

    stops = (f"<{RESULT}>",)
    around_result = f"<{RESULT}>", f"</{RESULT}>"
    after_form = f"\nAfter a call you are told its result in <{RESULT}>."

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        by_name = {spec.name: spec for spec in specs}
        names = "|".join(map(re.escape, sorted([*by_name, ANSWER, RESULT], key=len, reverse=True)))
        tag = re.compile(f"<(/?)({names})>")
        outside: list[str] = []
        calls: list[Call] = []
        answer: str | None = None
        position = 0
        while found := tag.search(text, position):
            closing, name = found.groups()
            outside.append(text[position : found.start()])
            if name == RESULT:
                raise FormatError(f"The turn has <{closing}{RESULT}>: results come from the tools, after the turn")
            if closing:
                raise FormatError(f"The turn has </{name}> without <{name}> before it")
            end = text.find(f"</{name}>", found.end())
            if end < 0:
                raise FormatError(f"The turn has no </{name}> after <{name}>")
            body = text[found.end() : end]
            if name == ANSWER:
                answer = body.strip()
            else:
                calls.append((name, _arguments(body, by_name[name])))
            position = end + len(f"</{name}>")
        outside.append(text[position:])
        if calls and answer is not None:
            raise FormatError(f"The turn has a call and an <{ANSWER}>: write one of them")
        if not calls and answer is None:
            raise FormatError(f"The turn has neither a call nor an <{ANSWER}>")
        return Reading(join_parts(outside), calls, answer=answer)

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        return "\n".join(f"<{name}>{_body(arguments, find_spec(name, specs))}</{name}>" for name, arguments in calls)

    def write_answer(self, text: str) -> str:
        return f"<{ANSWER}>{text.strip()}</{ANSWER}>"

    def form(self, specs: Sequence[ToolSpec]) -> str:
        given: list[Call] = [(spec.name, {name: "..." for name in properties_of(spec.parameters)}) for spec in specs]
        tags = [self.write([call], specs) for call in given] + [self.write_answer("the final answer")]
        return f"Write {' or '.join(tags)}"

    def instructions(self, specs: Sequence[ToolSpec]) -> str | None:
        for name in (spec.name for spec in specs if spec.name in (ANSWER, RESULT)):
            raise SettingError("rollout.parser", f"tags has <{name}> for itself", f"give the tool {name} another name")
        return super().instructions(specs) or self.form(specs)


def _body(arguments: Arguments, spec: ToolSpec | None) -> str:
    """Return the only argument unchanged, if it can be parsed back; otherwise JSON without closing tags."""
    if spec is not None and len(arguments) == 1:
        (value,) = arguments.values()
        with suppress(FormatError):
            if isinstance(value, str) and f"</{spec.name}>" not in value and _arguments(value, spec) == arguments:
                return value
    return json.dumps(arguments, ensure_ascii=False).replace("</", "<\\/") if arguments else ""


def _arguments(body: str, spec: ToolSpec) -> Arguments:
    known = properties_of(spec.parameters)
    sole = sole_parameter(spec)
    body = body.strip()
    value, problem = whole_object(body)
    # an object that does not match the tool's arguments is itself the single argument
    if value is not None and (sole is None or value.keys() <= known.keys()):
        return value
    if not body and not known:
        return {}
    if sole is None:
        raise FormatError(f"<{spec.name}>: {problem} with {', '.join(known) or 'no arguments'}")
    return {sole: convert(body, known.get(sole, {}), spec.parameters)}
