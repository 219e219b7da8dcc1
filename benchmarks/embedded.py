"""Tokens per second of the embedded engine, over HTTP, against one batched `generate` of transformers.

Both run the same 3.7M-parameter Qwen3 on the same number of threads (the cores that this process may use). They
alternate, and sample 32 x 128 tokens from prompts of 256 tokens at temperature 1. The last line is the ratio of the
medians as JSON.

    taskset -c 0,1 python benchmarks/embedded.py [--quick]
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import aiohttp
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentfactory.rollout.inference.http_transport import authorization

REQUESTS, PROMPT, SAMPLED, VOCABULARY = 32, 256, 128, 2048


def make_model(folder: str) -> Any:
    """Return a randomly initialised Qwen3 with 3.7M parameters, and save it in `folder`."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=768,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def generate_seconds(model: Any, prompts: torch.Tensor) -> float:
    """Return the wall time of one batched generate."""
    start = time.perf_counter()
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        min_new_tokens=SAMPLED,
        max_new_tokens=SAMPLED,
    )
    assert out.shape == (REQUESTS, PROMPT + SAMPLED)
    return time.perf_counter() - start


async def server_seconds(url: str, prompts: torch.Tensor) -> float:
    """Return the wall time of one concurrent request per prompt; the server has not seen any of them before."""

    async def one(session: aiohttp.ClientSession, ids: list[int]) -> None:
        params = {"temperature": 1.0, "max_tokens": SAMPLED, "logprobs": 0, "ignore_eos": True}
        async with session.post(
            url + "/inference/v1/generate", json={"token_ids": ids, "sampling_params": params}
        ) as answer:
            assert len((await answer.json())["choices"][0]["token_ids"]) == SAMPLED

    key = authorization(url, None)
    async with aiohttp.ClientSession(headers=key, connector=aiohttp.TCPConnector(limit=0)) as session:
        start = time.perf_counter()
        await asyncio.gather(*[one(session, ids) for ids in prompts.tolist()])
        return time.perf_counter() - start


def main() -> None:
    """Run the comparison and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 repetitions in place of 5")
    repetitions = 2 if parser.parse_args().quick else 5
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(folder)
        command = [
            sys.executable,
            "-m",
            "agentfactory.rollout.inference.embedded",
            folder,
            "--port",
            "0",
            "--max-model-len",
            "512",
        ]
        server = subprocess.Popen(
            [*command, "--max-num-seqs", str(REQUESTS)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        try:
            assert server.stdout is not None
            ready = server.stdout.readline().split()
            if not ready:
                raise SystemExit("the server did not start")
            generate, served = [], []
            for index in range(repetitions + 1):
                prompts = torch.randint(0, VOCABULARY, (REQUESTS, PROMPT))
                rates = [
                    REQUESTS * SAMPLED / seconds
                    for seconds in (generate_seconds(model, prompts), asyncio.run(server_seconds(ready[1], prompts)))
                ]
                if index:  # the first round warms up
                    generate.append(rates[0])
                    served.append(rates[1])
                    print(f"generate {rates[0]:.0f} tokens/s, embedded {rates[1]:.0f} tokens/s", flush=True)
        finally:
            server.terminate()
            server.wait()
    ratio = statistics.median(served) / statistics.median(generate)
    print(json.dumps({"tokens_per_second_vs_generate": round(ratio, 2)}))


if __name__ == "__main__":
    main()
