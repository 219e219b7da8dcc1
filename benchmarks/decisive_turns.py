"""Does `agentfactory replay` rank the turn first on which a chain's outcome hung?

In the quickstart's hunt, one wrong step can be made good, and a second one cannot. Chains on held-out tasks take a
shortest way, with wrong steps at two planted turns; the second is decisive. A policy that has learned to hunt samples
continuations before each turn. Each chain is played again token by token, and each state must be the saved one.

    python benchmarks/decisive_turns.py [--quick] [--output FOLDER] [--samples N]

The last line is JSON: `chains`, how many had the decisive turn `first`, and the seconds per chain.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from training_runs import only_checkpoint, train_once

from agentfactory.audit.replay.continuations import ranked, turn_effects
from agentfactory.audit.replay.prefix import tokens_of
from agentfactory.base.user_code.loading import load_object
from agentfactory.launching.served_weights import what_is_served
from agentfactory.launching.start_server import serve
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.chains.agent_hooks import AgentHooks, Turn
from agentfactory.rollout.chains.chain_runner import ChainRunner
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.data import load_tasks
from agentfactory.rollout.evaluation.evaluate import open_runner
from agentfactory.rollout.inference.inference_client import Completion
from agentfactory.rollout.token_row import Span
from agentfactory.rollout.trajectory import Trajectory

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart"
STEPS = load_object("treasure_hunt.py:STEPS", QUICKSTART)
distance = load_object("treasure_hunt.py:distance", QUICKSTART)
SIZE = load_object("treasure_hunt.py:SIZE", QUICKSTART)
LEAST = 4
"""Least distance of the treasure, so that there is room for two wrong steps."""


class Planted(AgentHooks):
    """Hooks that take given directions, as if the policy had sampled them."""

    def __init__(self, directions: list[str]) -> None:
        self.directions = directions

    async def generate(self, turn: Turn) -> Completion:
        """See AgentHooks."""
        function = {"name": "move", "arguments": {"direction": self.directions[turn.number]}}
        message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        ids = tokens_of(message, turn.messages, turn.specs, turn.renderer)
        completion = Completion(ids, [-0.1] * len(ids), [Span("planted", 0, len(ids))], False, [1] * len(ids))
        turn.made.append(completion)
        return completion


def way(task: dict[str, Any], wrong: tuple[int, int]) -> list[str] | None:
    """Return directions with steps away from the treasure at two turns, from 0, until the moves are used up; None if
    there is no room for a wrong step."""
    here, there = tuple(task["start"]), tuple(task["treasure"])
    directions = []
    for turn in range(distance(here, there) + 2):
        moves = {name: (here[0] + down, here[1] + right) for name, (down, right) in STEPS.items()}
        inside = {name: cell for name, cell in moves.items() if all(1 <= place <= SIZE for place in cell)}
        away = turn in wrong
        fitting = [n for n, cell in inside.items() if (distance(cell, there) > distance(here, there)) is away]
        if not fitting:
            return None
        directions.append(fitting[0])
        here = inside[fitting[0]]
    return directions


async def planted(runner: ChainRunner, task: dict[str, Any], directions: list[str], name: str) -> Trajectory:
    """Return a chain that takes these directions."""
    setup = runner.setup
    one = ChainRunner(
        setup.recipe, runner.renderer, runner.client, runner.toolset, runner.rewards, Planted(directions)
    ).with_max_turns(len(directions))
    return await one.run(name, task, Sampling("", 0.0, name))


async def measure(run: Path, chains: int, samples: int) -> dict[str, Any]:
    """Plant and rank; print a line per chain."""
    recipe = load_recipe(run / "grpo" / "recipe.yaml", [])
    assert isinstance(recipe, Recipe)
    held_out = recipe.held_out_parts()[0]
    tasks, rng = load_tasks(held_out.recipe.data, held_out.section), random.Random(0)
    served = what_is_served(recipe, only_checkpoint(run / "grpo"))
    first, done, began = 0, 0, time.monotonic()
    async with (
        serve(served.recipe, served.adapters) as (_, url),
        open_runner(held_out.recipe, run / "grpo", url) as runner,
    ):
        for number, task in enumerate(tasks):
            moves = distance(tuple(task["start"]), tuple(task["treasure"]))
            if moves < LEAST or moves + 2 > recipe.rollout.max_turns:
                continue
            wrong = sorted(rng.sample(range(moves), 2))
            directions = way(task, (wrong[0], wrong[1]))
            if directions is None:
                continue
            chain = await planted(runner, task, directions, f"planted-{number}")
            assert chain.metrics["success"] == 0.0, chain.error
            effects = await turn_effects(runner, replace(chain), task, samples, served.name)
            order = [effect.turn for effect in ranked(effects)]
            first += order[0] == wrong[1] + 1
            done += 1
            shown = ", ".join(f"{one.turn}: {one.effect:+.2f}" for one in effects)
            print(f"wrong at {wrong[0] + 1} and {wrong[1] + 1}; first is {order[0]}; {shown}", flush=True)
            if done == chains:
                break
    return {"chains": done, "first": first, "seconds_per_chain": round((time.monotonic() - began) / done, 1)}


def main() -> None:
    """Train the policy, and rank the turns of planted chains."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four chains")
    parser.add_argument("--output", type=Path, help="folder for the run; default: a temporary one")
    parser.add_argument("--samples", type=int, default=16, help="continuations before each turn (default: 16)")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = args.output or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        train_once(1, folder / "run", QUICKSTART / "quickstart.yaml")
        result = asyncio.run(measure(folder / "run", 4 if args.quick else 20, args.samples))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
