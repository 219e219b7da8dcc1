"""The cost of a weight sync: full weights pushed into a server and proven, compared with a plain copy of the bytes.

A random model of each size is served by the embedded engine on the CPU, in a separate process. Every weight changes,
then the version is pushed by `file` and by `ipc`. Between the pushes, a plain copy brings the same bytes into another
process by the same means (a file that it reads; a block of shared memory that it copies from), without server and
proof. The first round is not counted, since the trainer does not know the server's layouts yet. The proof's time is the
trainer's wait for it after the transfer; the server generates meanwhile. It generates nothing from /pause to /resume.
All results are the shortest of the rounds.

The last line is JSON, all for the largest size: `push_vs_copy` is the time of a push with its proof over that of the
copy, for the backend where it is larger; `push_vs_copy_file` and `push_vs_copy_ipc` are each backend's, and
`paused_vs_copy_*` compare the time without generation with the same copy.

    python benchmarks/sync.py [--quick]
"""

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentfactory.launching.start_server import serve
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.trainers.networks.gathered_weights import Weights
from agentfactory.trainers.sync.content_proof import Content
from agentfactory.trainers.sync.file_sync import FileSync
from agentfactory.trainers.sync.ipc_sync import Buffer, IpcSync, parts
from agentfactory.trainers.sync.server_control import ServerControl

LAYER_BYTES = 4 * (3 * 2048 * 1024 + 2 * 1024 * 1024 + 2 * 512 * 1024)
SIZES = {True: (64, 256), False: (64, 256, 1024)}
"""MiB, by --quick."""
ROUNDS = {True: 5, False: 9}
BLOCK_BYTES = 2**28
"""Largest block of shared memory of a plain copy."""

State = dict[str, Tensor]


def make_model(folder: Path, mebibytes: int) -> Path:
    """Create a Qwen3 of about this size in float32, whose layers are as wide as those of Qwen3 0.6B."""
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=max(1, round(mebibytes * 2**20 / LAYER_BYTES)),
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def receive(model: str, pipe: Connection) -> None:
    """Copy the weights of each message into weights of this process."""
    state = load_file(model)
    state = {name: value.clone() for name, value in state.items()}
    blocks: dict[str, SharedMemory] = {}
    while (message := pipe.recv()) is not None:
        match message:
            case ("file", path):
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        state[name].copy_(file.get_tensor(name))
            case ("part", block, names):
                memory = blocks.setdefault(block, SharedMemory(block))
                start = 0
                for name in names:
                    size = state[name].nbytes
                    data = torch.frombuffer(memory.buf, dtype=torch.uint8, count=size, offset=start)
                    state[name].view(-1).view(torch.uint8).copy_(data)
                    del data
                    start += size
            case ("close", block):
                blocks.pop(block).close()
        pipe.send("done")


class Copy:
    """A plain copy into another process."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=receive, args=(str(model / "model.safetensors"), other), daemon=True)
        self.process.start()

    def tell(self, *message: object) -> None:
        """Send a message to the other process, and wait until it has handled it."""
        self.pipe.send(message)
        self.pipe.recv()

    def by_file(self, state: State) -> None:
        """Write a file; the other process reads it."""
        file = self.folder / "copy.safetensors"
        save_file(state, file)
        self.tell("file", str(file))
        file.unlink()

    def by_ipc(self, state: State) -> None:
        """Write parts into shared memory; the other process copies each from there."""
        capacity = min(sum(value.nbytes for value in state.values()), BLOCK_BYTES)
        with closing(Buffer(capacity, torch.device("cpu"))) as buffer:
            [(block, _)] = buffer.handles.values()
            for part in parts(state, capacity):
                buffer.fill(part)
                self.tell("part", block, [name for name, _ in part])
            self.tell("close", block)

    def close(self) -> None:
        """End the other process."""
        self.pipe.send(None)
        self.process.join()


def seconds_of(act: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def measure(model: Path, folder: Path, url: str, rounds: int) -> dict[str, float]:
    """Print the results of one size, and return them by backend."""
    servers = [ServerControl(url)]
    state = {name: value.clone() for name, value in load_file(model / "model.safetensors").items()}
    size = sum(value.nbytes for value in state.values())
    copy, proofs, times = Copy(model, folder), [], {}
    proves, posts = Content.prove, ServerControl.post

    def noted(server: ServerControl, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        times[path.partition("?")[0]] = time.perf_counter()
        return posts(server, path, body)

    def timed(content: Content, server: ServerControl, label: str) -> str:
        start = time.perf_counter()
        digest = proves(content, server, label)
        proofs.append(time.perf_counter() - start)
        return digest

    results = {}
    backends: dict[str, tuple[Any, Callable[[State], None]]] = {
        "file": (FileSync(servers, folder / "sync"), copy.by_file),
        "ipc": (IpcSync(servers, device=torch.device("cpu")), copy.by_ipc),
    }
    for name, (sync, plain) in backends.items():
        figures = defaultdict(list)
        for version in range(rounds + 1):
            for value in state.values():
                value.add_(1e-3)
            figures["copy"].append(seconds_of(lambda plain=plain: plain(state)))
            push = partial(sync.push, version, None, Weights(state.items()))
            with patch.object(Content, "prove", timed), patch.object(ServerControl, "post", noted):
                figures["push"].append(seconds_of(push))
            figures["proof"].append(proofs.pop())
            figures["paused"].append(times["/resume"] - times["/pause"])
        sync.close()
        copied, pushed, proof, paused = (min(figures[key][1:]) for key in ("copy", "push", "proof", "paused"))
        print(
            f"{size / 2**20:6.0f} MiB by {name:4}: copy {copied * 1e3:6.0f} ms, push {pushed * 1e3:6.0f} ms "
            f"({pushed / copied:.2f}), of which proof {proof * 1e3:5.0f} ms; server paused {paused * 1e3:5.0f} ms",
            flush=True,
        )
        results |= {f"push_vs_copy_{name}": pushed / copied, f"paused_vs_copy_{name}": paused / copied}
    copy.close()
    return results


async def main() -> None:
    """Measure each size, with a separate server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller models, fewer rounds: a minute")
    args = parser.parse_args()
    results: dict[str, float] = {}
    for mebibytes in SIZES[args.quick]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = make_model(folder / "model", mebibytes)
            server = {"engine": "embedded", "max_model_len": 64, "max_num_seqs": 2}
            policy = {"path": str(model), "dtype": "float32"}
            recipe = RolloutRecipe.model_validate({"model": policy, "server": server})
            async with serve(recipe, {}) as (_, url):
                results = await asyncio.to_thread(measure, model, folder, url, ROUNDS[args.quick])
    worst = max(results["push_vs_copy_file"], results["push_vs_copy_ipc"])
    print(json.dumps({"push_vs_copy": round(worst, 2), **{key: round(value, 2) for key, value in results.items()}}))


if __name__ == "__main__":
    asyncio.run(main())
