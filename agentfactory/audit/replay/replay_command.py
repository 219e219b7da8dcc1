"""`agentfactory replay`: continue a saved chain many times from a turn, and compare the outcomes."""

import argparse
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentfactory.base.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentfactory.audit.replay.continuations import Results
    from agentfactory.audit.replay.saved_chain import SavedChain
    from agentfactory.base.messages import Message, ToolSpec
    from agentfactory.rollout.chains.chain_runner import ChainRunner
    from agentfactory.rollout.trajectory import Trajectory

ABOUT = "play a saved chain again up to a turn, and sample what follows; or rank its turns"
EXAMPLES = [
    "replay runs/mine g000012.3",
    "replay runs/mine g000012.3 --turn 2 --samples 32",
    'replay runs/mine g000012.3 --turn 2 --action \'{"name": "move", "arguments": {"direction": "east"}}\'',
    "replay runs/mine g000012.3 --turn 2 --result 'The door is open.' --save pairs.jsonl",
]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", type=Path, help="a run folder, such as runs/quickstart")
    parser.add_argument("chain", metavar="CHAIN", help="the chain's id, as the viewer and `audit` show it")
    about = "sample from before this turn, counted from 1; default: from before each, to rank them"
    parser.add_argument("--turn", type=int, metavar="K", help=about)
    parser.add_argument("--samples", type=int, metavar="N", default=16, help="continuations of each kind; default: 16")
    about = "also with this text as the results of the turn's calls, which are still made"
    parser.add_argument("--result", metavar="TEXT", help=about)
    about = 'also with this action at the turn: a call as {"name": TOOL, "arguments": {...}}, or an answer\'s text'
    parser.add_argument("--action", metavar="JSON_OR_TEXT", help=about)
    about = "also with another system prompt; the messages are rendered again, so their tokens are not the sampled ones"
    parser.add_argument("--system", metavar="TEXT", help=about)
    about = "also with the weights of this checkpoint"
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help=about)
    parser.add_argument(
        "--save", type=Path, metavar="FILE.jsonl", help="append the best and the worst as a row of data"
    )
    about = "kind of that row; default: preferences, without --turn credit"
    parser.add_argument("--as", dest="kind", choices=("preferences", "sft", "credit"), help=about)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Play the chain again, and print the results. Raises SettingError: an option is invalid, or the chain differs."""
    _check(options)
    # these take seconds to import
    from agentfactory.audit.replay.replay_runner import own_messages
    from agentfactory.audit.replay.saved_chain import find_chain
    from agentfactory.audit.run_record import records_at
    from agentfactory.base.messages import ToolInfrastructureError
    from agentfactory.base.processes.interruption import run_interruptibly
    from agentfactory.launching.child_processes import ChildFailed
    from agentfactory.launching.run_folder import RunFolderError

    saved = find_chain(records_at(options.folder), options.chain)
    if options.result is not None and options.turn <= saved.chain.turns:
        said = saved.chain.messages[own_messages(saved.chain)[options.turn - 1]]
        if not said.get("tool_calls"):
            raise SettingError("--result", f"turn {options.turn} makes no call", "name a turn with a call")
    if options.turn is not None and options.turn > saved.chain.turns:
        raise SettingError(
            "--turn", f"got {options.turn}, and the chain has {saved.chain.turns} turns", "use a lower one"
        )

    def tell(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    try:
        run_interruptibly(_rank(options, saved, tell, say) if options.turn is None else _try(options, saved, tell, say))
    except RunFolderError as error:
        raise SettingError("", str(error), "name another checkpoint") from None
    except (ChildFailed, ToolInfrastructureError) as error:
        print(f"agentfactory: failed: {error}", file=sys.stderr)
        return 1
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in ("turn", "samples"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise SettingError(f"--{name}", f"got {value}", "use at least 1")
    changes = [name for name in ("result", "action", "system", "checkpoint") if getattr(options, name) is not None]
    if changes and options.turn is None:
        raise SettingError(f"--{changes[0]}", "given without a turn", "name the turn by --turn")
    if len(changes) > 1:
        raise SettingError(f"--{changes[1]}", f"given with --{changes[0]}", "change one thing at a time")
    if (options.kind == "credit") is not (options.turn is None) and options.kind is not None:
        kinds = "preferences or sft" if options.turn else "credit"
        raise SettingError(
            "--as", f"got {options.kind!r} {'with' if options.turn else 'without'} --turn", f"use {kinds}"
        )
    if options.kind is not None and options.save is None:
        raise SettingError("--as", f"got {options.kind!r} without --save", "name the file by --save")
    if options.save is not None:
        if not options.save.absolute().parent.is_dir():
            raise SettingError("--save", f"{options.save.parent} is not a folder", "create it first")
        if options.save.is_dir():
            raise SettingError("--save", f"{options.save} is a folder", "name a file in it")
    if options.action is not None:
        _message(options.action)


@asynccontextmanager
async def _opened(
    saved: "SavedChain", checkpoint: Path | None, tell: Callable[[str], None]
) -> "AsyncIterator[tuple[ChainRunner, str]]":
    from agentfactory.launching.served_weights import what_is_served
    from agentfactory.launching.start_server import serve
    from agentfactory.rollout.evaluation.evaluate import open_runner

    record = saved.record
    assert record.recipe is not None
    # the run's server is gone
    server = record.recipe.server.model_copy(update={"url": None})
    served = what_is_served(record.recipe.model_copy(update={"server": server}), checkpoint)
    sampled = "" if saved.version is None else f" (the chain was sampled by version {saved.version})"
    tell(f"starting the {served.recipe.server.engine} server on {served.label}{sampled}")
    async with (
        serve(served.recipe, served.adapters) as (_, url),
        open_runner(saved.part.recipe, record.folder, url, images=record.folder / "images") as runner,
    ):
        yield runner, served.name


async def _rank(
    options: argparse.Namespace, saved: "SavedChain", tell: Callable[[str], None], say: Callable[[str], None]
) -> None:
    from agentfactory.audit.replay.continuations import ReplayError, credit, ranked, turn_effects
    from agentfactory.audit.reports import save_replay

    async with _opened(saved, saved.checkpoint(), tell) as (runner, model):
        try:
            effects = await turn_effects(runner, saved.chain, saved.task, options.samples, model)
        except ReplayError as error:
            raise SettingError("CHAIN", str(error), "look at what its tools draw or keep") from None
        specs = runner.setup.specs
    order = ranked(effects)
    plain = [{"turn": one.turn, "effect": one.effect, "before": _plain(one.before)} for one in order]
    told = {"chain": saved.chain.id, "figure": effects[0].before.figure, "turns": plain}
    if not save_replay(saved.record.folder, told):
        tell(f"{saved.record.folder} cannot be written: the viewer will not show this replay")
    if options.save is not None:
        _append(options.save, credit(saved.chain, effects, specs))
    if options.json:
        say(json.dumps(told))
        return
    figure = effects[0].before.figure
    say(f"{saved.chain.id}: {figure} {effects[-1].after.mean:g}; its turns, by how much the outcome hung on them:")
    for one in order:
        what = f"{one.before.mean:.2f} -> {one.after.mean:.2f}"
        say(f"  turn {one.turn}: {one.effect:+.2f} ({figure} expected {what}, before it {_interval(one.before)})")


async def _try(
    options: argparse.Namespace, saved: "SavedChain", tell: Callable[[str], None], say: Callable[[str], None]
) -> None:
    from agentfactory.audit.replay.continuations import ReplayError, continuations, preference, transcript
    from agentfactory.audit.replay.saved_chain import check_same_tokens
    from agentfactory.audit.reports import save_replay

    chain, turns = saved.chain, options.turn - 1
    change, played = _change(options, turns)
    results: list[tuple[str, Results]] = []
    if options.checkpoint is not None:
        check_same_tokens(saved, options.checkpoint)
    try:
        async with _opened(saved, saved.checkpoint(), tell) as (runner, model):
            _check_action(options, runner.setup.specs)
            found = await continuations(runner, chain, saved.task, turns, options.samples, model)
            results.append(("as it was", found))
            if change is not None:
                found = await continuations(runner, chain, saved.task, played, options.samples, model, change)
                results.append((_name(options), found))
            specs = runner.setup.specs
        if options.checkpoint is not None:
            async with _opened(saved, options.checkpoint, tell) as (runner, model):
                found = await continuations(runner, chain, saved.task, turns, options.samples, model)
                results.append((_name(options), found))
    except ReplayError as error:
        raise SettingError("CHAIN", str(error), "look at what its tools draw or keep") from None
    told = {"chain": chain.id, "turn": options.turn, "exact": options.system is None}
    told["results"] = {name: _plain(found) for name, found in results}
    if not save_replay(saved.record.folder, told):
        tell(f"{saved.record.folder} cannot be written: the viewer will not show this replay")
    if options.json:
        say(json.dumps(told))
    else:
        _tell_results(options, chain, results, say)
    if options.save is not None:
        every = [one for _, found in results for one in found.chains]
        try:
            row = transcript(every, specs) if options.kind == "sft" else preference(chain, turns, every, specs)
        except ValueError as error:
            raise SettingError("--save", str(error), "raise --samples, or change something else") from None
        _append(options.save, row)


def _tell_results(
    options: argparse.Namespace,
    chain: "Trajectory",
    results: "Sequence[tuple[str, Results]]",
    say: Callable[[str], None],
) -> None:
    say(f"{chain.id}, from before turn {options.turn}; the chain itself has the reward {chain.reward}")
    for name, found in results:
        say(f"  {name}: {found.figure} {found.mean:.2f} {_interval(found)}, {len(found.chains)} continuations")
    if options.system is not None:
        say("  the messages were rendered again with the other system prompt: their tokens are not the sampled ones")


def _change(options: argparse.Namespace, turns: int) -> tuple[Any, int]:
    """Return the change, if any, and the number of turns that are then played again."""
    from agentfactory.audit.replay.prefix import Change

    if options.result is not None:
        return Change(result=options.result), turns + 1
    if options.action is not None:
        return Change(actions={turns: _message(options.action)}), turns + 1
    if options.system is not None:
        return Change(system=options.system), turns
    return None, turns


def _message(text: str) -> "Message":
    """Return the assistant's message with a call, or with a text, which does not begin with a brace."""
    if not text.strip():
        raise SettingError("--action", "got an empty text", "write a call, or an answer")
    if not text.lstrip().startswith("{"):
        return {"role": "assistant", "content": text}
    try:
        call = json.loads(text)
        is_call = isinstance(call["name"], str) and isinstance(call["arguments"], dict)
    except (ValueError, LookupError, TypeError):
        is_call = False
    if not is_call:
        raise SettingError("--action", f"got {text}", 'write a call as {"name": TOOL, "arguments": {...}}')
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def _check_action(options: argparse.Namespace, specs: "Sequence[ToolSpec]") -> None:
    """Raise SettingError if an action calls a tool that there is not, or with arguments that its schema refuses."""
    from agentfactory.tools.calls.argument_check import ArgumentCheck, UncheckedError

    for call in _message(options.action).get("tool_calls") or [] if options.action is not None else []:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        spec = next((spec for spec in specs if spec.name == name), None)
        if spec is None:
            names = ", ".join(spec.name for spec in specs)
            raise SettingError("--action", f"there is no tool {name!r}", f"call one of {names}")
        try:
            fault = ArgumentCheck(spec.parameters).fault(arguments)
        except UncheckedError:
            continue
        if fault is not None:
            raise SettingError("--action", f"{name} refuses {json.dumps(arguments)}: {fault}", "correct the arguments")


def _name(options: argparse.Namespace) -> str:
    given = next(name for name in ("result", "action", "system", "checkpoint") if getattr(options, name) is not None)
    return f"with another {given if given != 'system' else 'system prompt'}"


def _plain(found: "Results") -> dict[str, Any]:
    return {"mean": found.mean, "interval": found.interval, "chains": len(found.chains), "figure": found.figure}


def _interval(found: "Results") -> str:
    return "" if found.interval is None else f"[{found.interval[0]:.2f}, {found.interval[1]:.2f}]"


def _append(file: Path, row: dict[str, Any]) -> None:
    from agentfactory.base.files.disk import append

    append(file, json.dumps(row, ensure_ascii=False) + "\n")
