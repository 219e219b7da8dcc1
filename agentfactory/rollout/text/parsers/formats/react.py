"""ReAct (Yao et al., 2022, arXiv:2210.03629): `Thought:`, `Action:`, `Action Input:`, and finally `Final Answer:`."""

import json
import re
from collections.abc import Sequence

from agentfactory.base.messages import ToolSpec, properties_of
from agentfactory.rollout.text.parsers import Arguments, Call, FormatError, Parser, Reading
from agentfactory.rollout.text.parsers.blocks import join_parts
from agentfactory.rollout.text.parsers.parser import find_spec, sole_parameter
from agentfactory.rollout.text.parsers.values import convert, whole_object

_LABEL = re.compile(r"^[ \t]*+(Thought|Action Input|Action|Observation|Final Answer)[ \t]*+:", re.MULTILINE)
_ANSWER_FORM = "Thought: ...\nFinal Answer: the answer"


class React(Parser):
    """One action per turn: `Action: search` and `Action Input: {"query": "rain"}` on separate lines. An input that is
    not a JSON object is the value of the tool's only parameter, or its only required one."""

    stops = ("\nObservation:",)
    around_result = "Observation: ", ""
    after_form = "\nAfter an action you are told its result as Observation: ..."

    def read(self, text: str, specs: Sequence[ToolSpec]) -> Reading:
        found = list(_LABEL.finditer(text))
        labels = [match[1] for match in found]
        edges = [0, *(edge for match in found for edge in match.span()), len(text)]
        first, *bodies = [text[start:end].strip() for start, end in zip(edges[::2], edges[1::2], strict=True)]
        content = join_parts([first, *(body for label, body in zip(labels, bodies, strict=True) if label == "Thought")])
        if "Observation" in labels:
            raise FormatError("The turn has an Observation: those come from the tools, after the turn")
        if "Final Answer" in labels:
            if "Action" in labels or "Action Input" in labels:
                raise FormatError("The turn has an Action and a Final Answer: write one of them")
            # an answer may contain lines that look like a label
            return Reading(content, answer=text[found[labels.index("Final Answer")].end() :].strip())
        acting = [label for label in labels if label != "Thought"]
        if not acting:
            raise FormatError("The turn has neither an Action nor a Final Answer")
        if acting != ["Action", "Action Input"] or labels[-1] != "Action Input":
            raise FormatError("The turn has to end with one Action and its Action Input")
        name = bodies[labels.index("Action")]
        if not name or "\n" in name:
            raise FormatError("Action has to be the name of one tool, on one line")
        return Reading(content, [(name, _arguments(name, bodies[-1], specs))])

    def write(self, calls: Sequence[Call], specs: Sequence[ToolSpec]) -> str:
        if len(calls) != 1:
            raise ValueError(f"react has one action a turn, not {len(calls)}")
        name, arguments = calls[0]
        return f"Action: {name}\nAction Input: {json.dumps(arguments, ensure_ascii=False)}"

    def write_answer(self, text: str) -> str:
        return f"Final Answer: {text.strip()}"

    def form(self, specs: Sequence[ToolSpec]) -> str:
        call = 'Thought: ...\nAction: tool_name\nAction Input: {"argument": "value"}'
        return f"Write either\n{call}\nor\n{_ANSWER_FORM}" if specs else f"Write\n{_ANSWER_FORM}"

    def instructions(self, specs: Sequence[ToolSpec]) -> str | None:
        return super().instructions(specs) or self.form(specs)


def _arguments(name: str, text: str, specs: Sequence[ToolSpec]) -> Arguments:
    spec = find_spec(name, specs)
    sole = None if spec is None else sole_parameter(spec)
    value, problem = whole_object(text)
    if value is not None:
        return value
    if spec is None or sole is None:
        raise FormatError(f"Action Input of {name}: {problem}")
    return {sole: convert(text, properties_of(spec.parameters).get(sole, {}), spec.parameters)}
