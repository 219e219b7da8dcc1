"""Is a chain that is played again in the same state, in each world that gives anchors?

Chains of random calls on the tasks of a recipe are saved as a run saves them: calls as tokens, results as messages, and
the anchor of the environment's state before each turn. Each is then played again from its tokens, in another instance
of the environment: all results, anchors and the reward must be the saved ones.

    python benchmarks/replay_states.py [--quick] [--only WORLD ...] [--alfworld-python PYTHON]

The last line is JSON: per world, the number of `chains`, how many were the `same`, and the `anchors` compared.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from agentfactory.audit.check import Opened, open_part
from agentfactory.audit.replay.prefix import tokens_of
from agentfactory.base.messages import text_of
from agentfactory.launching.child_processes import Children
from agentfactory.launching.prepare import run_prepare
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.chains.agent_hooks import AgentHooks, Turn
from agentfactory.rollout.chains.chain_runner import ChainRunner
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.data import load_tasks
from agentfactory.rollout.inference.inference_client import Completion
from agentfactory.rollout.token_row import Span
from agentfactory.worlds.commands.trial import NoLegalCall, RandomCalls

sys.path.append(str(Path(__file__).parents[1]))
from tests.chat_tokenizers import make_tokenizer, trl_template

RECIPES = Path(__file__).parents[1] / "recipes"
CHAINS, TURNS = 200, 6
OPENENV_PORT = 18741
WORLDS: dict[str, tuple[Path | None, tuple[str, ...]]] = {
    "hunt": (RECIPES / "quickstart" / "grpo.yaml", ()),
    "gym": (RECIPES / "gymnasium" / "grpo.yaml", ()),
    "textarena": (RECIPES / "textarena" / "grpo.yaml", ()),
    "webshop": (RECIPES / "webshop" / "grpo.yaml", ()),
    "scienceworld": (RECIPES / "scienceworld" / "grpo.yaml", ("rewards=[]",)),
    "alfworld": (RECIPES / "alfworld" / "grpo.yaml", ()),
    "openenv": (None, ()),
}
"""World -> the recipe with its tasks, and overrides."""


class RandomPlayer(AgentHooks):
    """Hooks that take random calls, as if the policy had sampled them, and at last an answer."""

    async def generate(self, turn: Turn) -> Completion:
        """See AgentHooks."""
        calls = RandomCalls(list(turn.specs), random.Random(f"{turn.chain}/{turn.number}").getrandbits(31))
        calls.see(text_of(turn.messages[-1].get("content") or ""))
        message: dict[str, Any] = {"role": "assistant", "content": "I stop here."}
        if turn.number < TURNS:
            try:
                name, arguments = calls.draw()
                function = {"name": name, "arguments": arguments}
                message = {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": function}],
                }
            except NoLegalCall:
                pass
        ids = tokens_of(message, turn.messages, turn.specs, turn.renderer)
        completion = Completion(ids, [-0.1] * len(ids), [Span("random", 0, len(ids))], False, [1] * len(ids))
        turn.made.append(completion)
        return completion


async def measure(recipe: Recipe, chains: int, folder: Path) -> dict[str, int]:
    """Play and play again; print the first difference."""
    part = recipe.parts()[0]
    tasks = load_tasks(part.recipe.data, part.section)
    same = anchors = done = 0
    async with AsyncExitStack() as stack:
        opened: Opened = await stack.enter_async_context(open_part(part.recipe, folder, folder / "images"))
        setup = opened.runner.setup
        # nothing is sampled, so there is no server
        player = ChainRunner(
            setup.recipe,
            opened.renderer,
            None,
            opened.runner.toolset,
            opened.rewards,
            RandomPlayer(),  # type: ignore[arg-type]
        )
        for number in range(chains):
            row = await player.take(tasks[number % len(tasks)])
            saved = await player.run(f"c{number}", row, Sampling("random", 1.0, str(number)))
            if saved.reward is None:
                raise RuntimeError(f"chain {number}: {saved.outcome}: {saved.error}")
            again = await opened.runner.replay(saved, row)
            is_same = again.diverged is None and again.chain.reward == saved.reward
            if not is_same and same == done:
                print(
                    f"  chain {number}: {again.diverged or f'reward {again.chain.reward}, was {saved.reward}'}",
                    flush=True,
                )
            same += is_same
            done += 1
            anchors += sum(anchor is not None for anchor in saved.anchors)
    return {"chains": done, "same": same, "anchors": anchors}


def recipe_of(world: str, model: Path, output: Path, url: str) -> Recipe:
    """Return the recipe of a world, with what it prepares."""
    path, overrides = WORLDS[world]
    if path is None:
        path = output / "openenv.yaml"
        source = {"url": url, "tasks": 50, "seconds": 20}
        fields = {"model": {"path": str(model)}, "data": {"openenv": source}, "train": {"steps": 1}}
        path.write_text(json.dumps(fields))
    recipe = load_recipe(path, [*overrides, f"output={output}"], "rollout")
    assert isinstance(recipe, Recipe)
    if recipe.prepare is not None:
        # this would end the server of OpenEnv, too
        with Children() as children:
            run_prepare(recipe, children, print)
    rollout = {"max_turns": TURNS + 1, "max_total_tokens": 8192, "parser": "hermes", "context": {"policy": "keep"}}
    settings = [f"rollout.{name}={json.dumps(value)}" for name, value in rollout.items()]
    longer = ["server.max_model_len=8192", f"model.path={model}", f"output={output}"]
    found = load_recipe(path, [*overrides, *settings, *longer], "rollout")
    assert isinstance(found, Recipe)
    return found


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def served() -> Iterator[str]:
    """Yield the address of a world of ours, served to other trainers by OpenEnv's protocol."""
    world = [sys.executable, "-m", "agentfactory", "worlds", "serve", "gym", "id=FrozenLake-v1", "--as", "openenv"]
    process = subprocess.Popen([*world, "--port", str(OPENENV_PORT)], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not _answers(OPENENV_PORT):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the world is not served; its output is above")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{OPENENV_PORT}"
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Measure each world, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="ten chains of the first three worlds")
    parser.add_argument("--only", nargs="*", default=[], choices=WORLDS, metavar="WORLD", help="these worlds alone")
    parser.add_argument("--alfworld-python", metavar="PYTHON", help="the Python with ALFWorld (`make alfworld`)")
    args = parser.parse_args()
    if args.alfworld_python:
        os.environ["AGENTFACTORY_ALFWORLD_PYTHON"] = args.alfworld_python
    worlds: Sequence[str] = args.only or [*WORLDS]
    if args.quick:
        worlds = worlds[:3]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_tokenizer(trl_template("qwen3")).save_pretrained(model)
        (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 32768}))
        for world in worlds:
            output, began = Path(folder) / world, time.monotonic()
            output.mkdir()
            with served() if world == "openenv" else tempfile.SpooledTemporaryFile() as url:
                recipe = recipe_of(world, model, output, str(url))
                found[world] = asyncio.run(measure(recipe, 10 if args.quick else CHAINS, output))
            print(f"{world:14} {found[world]} {time.monotonic() - began:.0f} s", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
