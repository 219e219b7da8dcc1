"""The wait of a training step for a checkpoint: one process, and two ranks that shard the learner (FSDP2 over gloo).

A random model in float32 with AdamW's state is saved in rounds. A step's wait lasts until the copy is in host memory
(with two ranks, also until rank 0 has gathered the model). It is compared with a plain copy of the same bytes to
allocated memory, and with a synchronous save, which waits until the checkpoint is durable. With two ranks the slower
one counts. All results are the shortest of the rounds; the first round, which allocates the memory, is not counted.

The last line is JSON: `wait_vs_copy` and `wait_vs_synchronous` are the ratios for one process, `..._two` for two ranks.

    python benchmarks/checkpoints.py [--quick]
"""

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentfactory.trainers.checkpoints.checkpoint import CheckpointWriter
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.processes.accelerator import make_accelerator
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.learner_state import part_of

LAYERS = {True: 2, False: 8}
"""By --quick; with AdamW's state and the served model, each takes 150 MB of a checkpoint."""
ROUNDS = {True: 3, False: 7}
KINDS = ("copy", "wait", "synchronous")


def make_model(folder: Path, layers: int) -> None:
    """Create a Qwen3 whose layers are as wide as those of Qwen3 0.6B."""
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    vocabulary = models.WordLevel({f"w{number}": number for number in range(1024)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary)).save_pretrained(folder)


def seconds_of(act: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def measure(rank: int, ranks: int, port: int, folder: Path, rounds: int, pipe: Connection) -> None:
    """Send the number of bytes that this rank copies, and the seconds of each round by kind."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    strategy = "single"
    if ranks > 1:
        strategy = "fsdp2"
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    train = {"steps": 1, "strategy": strategy, "processes": ranks, "batching": "padded"}
    recipe = TrainRecipe.model_validate({"model": {"path": str(folder / "model"), "dtype": "float32"}, "train": train})
    accelerator = make_accelerator(recipe)
    learner = Learner(recipe, accelerator)
    for weight in learner.model.parameters():
        weight.grad = torch.zeros_like(weight)
    learner.optimizer.step()
    learner.optimizer.zero_grad()
    writer = CheckpointWriter(folder / "checkpoints", PreTrainedTokenizerFast.from_pretrained(folder / "model"))
    size = bytes_copied(learner, rank)
    source, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        accelerator.wait_for_everyone()
        seconds["copy"].append(seconds_of(lambda: target.copy_(source)))
        accelerator.wait_for_everyone()
        start = time.perf_counter()
        writer.begin(number, learner, {})
        seconds["wait"].append(time.perf_counter() - start)
        path = writer.wait()
        seconds["synchronous"].append(time.perf_counter() - start)
        if rank == 0 and path is not None:
            shutil.rmtree(path)
    accelerator.end_training()
    pipe.send((size, seconds))


def bytes_copied(learner: Learner, rank: int) -> int:
    """Return the bytes of this rank's part of the state, and of the model on rank 0."""
    local = [value.to_local() if isinstance(value, DTensor) else value for value in part_of(learner).values()]
    model = learner.policy.gather().values()
    return sum(value.nbytes for value in [*local, *(model if rank == 0 else ())])


def compare(ranks: int, folder: Path, rounds: int) -> dict[str, float]:
    """Print the results of `ranks` ranks, and return the shortest seconds by kind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context, pipes, processes = multiprocessing.get_context("spawn"), [], []
    for rank in range(ranks):
        pipe, other = context.Pipe()
        process = context.Process(target=measure, args=(rank, ranks, port, folder, rounds, other))
        process.start()
        # so that the wait for a rank's results ends if it dies
        other.close()
        pipes.append(pipe)
        processes.append(process)
    sizes, found = zip(*(pipe.recv() for pipe in pipes), strict=True)
    for process in processes:
        process.join()
    best = {
        kind: min(max(round_) for round_ in zip(*(rank[kind][1:] for rank in found), strict=True)) for kind in KINDS
    }
    print(
        f"{ranks} process{'es' if ranks > 1 else ''}, {sum(sizes) / 1e6:.0f} MB: a plain copy {best['copy']:.3f} s, "
        f"a step waits {best['wait']:.3f} s, durable after {best['synchronous']:.3f} s",
        flush=True,
    )
    return best


def main() -> None:
    """Measure one process, then two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer rounds: half a minute")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", LAYERS[args.quick])
        for ranks, suffix in ((1, ""), (2, "_two")):
            best = compare(ranks, folder, ROUNDS[args.quick])
            for other in ("copy", "synchronous"):
                ratios[f"wait_vs_{other}{suffix}"] = round(best["wait"] / best[other], 3)
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
