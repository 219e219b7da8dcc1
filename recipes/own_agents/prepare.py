"""Create the recipes' inputs: the hunts of the quickstart, transcripts as each agent renders them, and models."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentfactory.base.user_code.loading import load_object

HERE = Path(__file__).parent
make_model, write_jsonl = (
    load_object(f"../quickstart/tiny_model.py:{name}", HERE) for name in ("make_model", "write_jsonl")
)
split_tasks, play_transcripts, TreasureHunt = (
    load_object(f"../quickstart/prepare.py:{name}", HERE)
    for name in ("split_tasks", "play_transcripts", "TreasureHunt")
)

Messages = list[dict[str, Any]]
MOVE = TreasureHunt.move.spec.to_openai()


def openai(folder: Path, seed: int) -> None:
    """Write the files for openai_agent.py."""
    _prepare(folder, seed, [MOVE], _system("openai_agent.py"))


def anthropic(folder: Path, seed: int) -> None:
    """Write the files for anthropic_agent.py, which has its own description of the tool."""
    (tool,) = load_object("anthropic_agent.py:TOOLS", HERE)
    function = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    _prepare(folder, seed, [{"type": "function", "function": function}], _system("anthropic_agent.py"))


def langgraph(folder: Path, seed: int) -> None:
    """Write the files for langgraph_agent.py, whose tool description is LangChain's."""
    from langchain_core.utils.function_calling import convert_to_openai_tool

    move = load_object("langgraph_agent.py:mover", HERE)(None)
    _prepare(folder, seed, [convert_to_openai_tool(move)], _system("langgraph_agent.py"))


def smolagents(folder: Path, seed: int) -> None:
    """Write the files for smolagents_agent.py, whose calls are code, and whose history contains each call twice."""
    _prepare(folder, seed, [], _system("smolagents_agent.py"), as_code)


def _system(file: str) -> str:
    return str(load_object(f"{file}:SYSTEM", HERE))


def _unchanged(messages: Messages) -> list[Messages]:
    return [messages]


def _prepare(
    folder: Path,
    seed: int,
    specs: list[dict[str, Any]],
    system: str,
    written: Callable[[Messages], list[Messages]] = _unchanged,
) -> None:
    rng = random.Random(seed)
    train, heldout = split_tasks(rng)
    opening = {"role": "system", "content": system}
    played = play_transcripts(train, rng)
    transcripts = [[opening, *conversation] for messages in played for conversation in written(messages)]
    rng.shuffle(transcripts)
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "heldout.jsonl", heldout)
    write_jsonl(folder / "transcripts.jsonl", [{"messages": messages, "tools": specs} for messages in transcripts])
    make_model(folder / "model", transcripts, specs, seed)


def as_code(messages: Messages) -> list[Messages]:
    """Return a conversation in the form of smolagents' CodeAgent, once per turn: up to that turn, which alone is
    trained."""
    told: Messages = []
    conversations = []
    for message in messages:
        text = message["content"]
        match message["role"]:
            case "user":
                told.append({"role": "user", "content": f"New task:\n{text}"})
            case "tool":
                shown = f"Observation:\nExecution logs:\nLast output from code snippet:\n{text}"
                told.append({"role": "user", "content": shown})
            case "assistant":
                calls = message.get("tool_calls")
                code = (
                    f"move({calls[0]['function']['arguments']['direction']!r})" if calls else f"final_answer({text!r})"
                )
                turn = f"<code>{code}</code>"
                conversations.append([*told, {"role": "assistant", "content": turn}])
                call = {"id": f"call_{len(conversations)}", "type": "function"}
                call["function"] = {"name": "python_interpreter", "arguments": code}
                told.append({"role": "assistant", "content": f"{turn}\nCalling tools:\n{[call]}", "weight": 0})
    return conversations
