"""The Tinker service against the product's own loop, at the same tokens: passes with their steps, and samples.

The model is a generated Qwen3 (hidden 256, 4 layers, vocabulary 8,192, float32), its adapters have rank 16 on all
layers. Each side does the same work in turn, in the same run:

- passes: cross_entropy on 16 rows of 256 random tokens each, and a step of AdamW. The service is called by the real SDK
  (`forward_backward` and `optim_step`, both awaited); the own side is `Learner.update` on `Learner.deal` of the same
  rows, in one process. Both have one thread per available core.
- samples: 32 requests at a time of 64 prompt tokens and exactly 64 sampled ones, from a trained adapter on the same
  embedded server: by the SDK (`SamplingClient.sample`), and by `InferenceClient.generate`, as rollouts do.

Numbers are the medians of several repetitions, after one that is left out. The last line is JSON:

- `passes`: tokens a second through the service, divided by the own loop's (higher is better).
- `samples`: the same for sampled tokens.

AGENTFACTORY_TINKER_PYTHON names a Python with the SDK (`make tinker`).

    python benchmarks/tinker_service.py [--quick]
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

VOCABULARY, RANK = 8192, 16
ROWS, LENGTH = 16, 256
REQUESTS, PROMPT, SAMPLED = 32, 64, 64


def rows() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(2, VOCABULARY) for _ in range(LENGTH + 1)] for _ in range(ROWS)]


def prompts(number: int) -> list[list[int]]:
    """Return the prompts of a repetition, which no cache has."""
    rng = random.Random(1000 + number)
    return [[rng.randrange(2, VOCABULARY) for _ in range(PROMPT)] for _ in range(REQUESTS)]


def client(repetitions: int) -> None:
    """Time the service by the SDK; print the seconds as JSON."""
    import tinker
    from tinker import types

    service = tinker.ServiceClient()
    name = service.get_server_capabilities().supported_models[0].model_name
    training = service.create_lora_training_client(str(name), rank=RANK, seed=0, train_unembed=False).result()
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * LENGTH},  # type: ignore[dict-item]
        )
        for row in rows()
    ]
    passes, samples = [], []
    for _ in range(repetitions):
        started = time.perf_counter()
        made, step = training.forward_backward(data, "cross_entropy"), training.optim_step(types.AdamParams())
        made.result()
        step.result()
        passes.append(time.perf_counter() - started)
    sampler = training.save_weights_and_get_sampling_client().result()
    for number in range(repetitions):
        params = types.SamplingParams(max_tokens=SAMPLED, stop=[], seed=1)
        inputs = [types.ModelInput.from_ints(prompt) for prompt in prompts(number)]
        started = time.perf_counter()
        futures = [sampler.sample(prompt, 1, params) for prompt in inputs]
        found = [future.result() for future in futures]
        samples.append(time.perf_counter() - started)
        assert all(len(answer.sequences[0].tokens) == SAMPLED for answer in found)
    training.save_weights_for_sampler("last").result()
    print(json.dumps({"passes": passes, "samples": samples}))


def own_passes(model: Path, repetitions: int) -> list[float]:
    import torch
    from accelerate import Accelerator

    from agentfactory.rollout.token_row import Row
    from agentfactory.trainers.batches.batch import training_row
    from agentfactory.trainers.config import TrainRecipe
    from agentfactory.trainers.loop.sft import _weighted_likelihood
    from agentfactory.trainers.update.learner import Learner

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    section = {"path": str(model), "dtype": "float32", "lora": {"rank": RANK}}
    recipe = TrainRecipe.model_validate({"model": section, "train": {"algorithm": "sft", "steps": 1}})
    learner = Learner(recipe, Accelerator(cpu=True))
    made = []
    for ids in rows():
        row = Row()
        row.append_context(ids[:1])
        row.append_sampled(ids[1:], [0.0] * LENGTH, [])
        made.append(training_row(row))
    seconds = []
    for _ in range(repetitions):
        started = time.perf_counter()
        learner.update(learner.deal([row for row in made if row is not None]), _weighted_likelihood)
        seconds.append(time.perf_counter() - started)
    return seconds


async def own_samples(url: str, adapter: Path, repetitions: int) -> list[float]:
    from agentfactory.rollout.inference.inference_client import InferenceClient
    from agentfactory.trainers.sync.server_control import ServerControl

    ServerControl(url).post("/v1/load_lora_adapter", {"lora_name": "own", "lora_path": str(adapter)})
    sampling = {"temperature": 1.0, "max_tokens": SAMPLED, "ignore_eos": True, "seed": 1}
    seconds = []
    async with InferenceClient(url) as own:
        await own.check_routes()
        for number in range(repetitions):
            # other prompts than the service's, which the server's cache has
            inputs = prompts(500 + number)
            started = time.perf_counter()
            await asyncio.gather(*(own.generate(prompt, "own", sampling) for prompt in inputs))
            seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(options.client)
        return
    python = os.environ.get("AGENTFACTORY_TINKER_PYTHON") or str(Path(".venv-tinker/bin/python").absolute())
    repetitions = 5 if options.quick else 15
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from update import make_model

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder / "model", VOCABULARY)
        # the proof draws from its words
        words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w1"))
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0").save_pretrained(folder / "model")
        recipe: dict[str, Any] = {"path": str(folder / "model"), "dtype": "float32", "lora": {"rank": RANK}}
        server = {"engine": "embedded", "max_model_len": 512, "max_num_seqs": REQUESTS}
        whole = {"model": recipe, "server": server, "output": str(folder / "out")}
        (folder / "recipe.yaml").write_text(json.dumps(whole))
        log = folder / "log"
        command = [sys.executable, "-m", "agentfactory", "serve", str(folder / "recipe.yaml"), "--as", "tinker"]
        with log.open("w") as stream:
            service = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        try:
            while not (exports := dict(re.findall(r"export (TINKER_\w+)=(\S+)", log.read_text()))).get(
                "TINKER_API_KEY"
            ):
                assert service.poll() is None, log.read_text()
                time.sleep(0.2)
            env = {**os.environ, **exports, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
            asked = [python, __file__, "--client", str(repetitions)]
            done = subprocess.run(asked, env=env, stdout=subprocess.PIPE, text=True, check=True)
            theirs = json.loads(done.stdout.splitlines()[-1])
            adapter = next((folder / "out" / "tinker").glob("*/sampler_weights/last/adapter-*"))
            url = re.findall(r"^ready (http://\S+)", log.read_text(), re.MULTILINE)[0]
            own = {"samples": asyncio.run(own_samples(url, adapter, repetitions))}
        finally:
            service.send_signal(signal.SIGINT)
            service.wait()
        own["passes"] = own_passes(folder / "model", repetitions)
    tokens = {"passes": ROWS * LENGTH, "samples": REQUESTS * SAMPLED}
    ratios = {}
    for name, count in tokens.items():
        ours, through = (statistics.median(seconds[name][1:]) for seconds in (own, theirs))
        ratios[name] = round(ours / through, 3)
        print(f"{name}: {count / through:,.0f} tokens/s through the service, {count / ours:,.0f} by the own loop")
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
