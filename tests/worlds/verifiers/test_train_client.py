"""Requests of verifiers' own training client, which prime-rl uses, to the embedded engine: the same token ids."""

import asyncio
import json
import os
from pathlib import Path

import aiohttp
import pytest

from agentfactory.rollout.config import ModelConfig
from agentfactory.rollout.inference.http_transport import authorization
from agentfactory.rollout.text.load_renderer import load_renderer
from tests.worlds.verifiers.test_verifiers import PYTHON, real

pytestmark = real

ASK = """
import asyncio, json, sys
from renderers.configs import DefaultRendererConfig
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

url, model, conversations = json.loads(sys.argv[1])


async def main():
    client = TrainClient(
        TrainClientConfig(
            base_url=url + "/v1",
            api_key_var="TRAIN_CLIENT_KEY",
            renderer=DefaultRendererConfig(tool_parser="qwen3"),
            renderer_model_name=model,
        )
    )
    sampling = SamplingConfig(temperature=0.0, max_tokens=40, routed_experts_prompt_start=3)
    for messages in conversations:
        body = {"model": "policy", "messages": messages}
        found = (await client.get_response(ChatDialect(), body, sampling)).tokens
        print(json.dumps([found.prompt_ids, found.completion_ids, found.completion_logprobs]))
    await client.close()


asyncio.run(main())
"""


async def test_the_client_that_trains_has_the_same_ids(warm_start: Path, warm_server: str) -> None:
    conversations = [
        [{"role": "user", "content": f"The treasure lies north.\nYou stand in row {n}, column 2 and have 4 moves."}]
        for n in range(5)
    ]
    conversations.append([*conversations[0], {"role": "assistant", "content": "north"}, *conversations[1]])
    asked = json.dumps([warm_server, str(warm_start), conversations])
    key = authorization(warm_server, None)
    environment = os.environ | {"TRAIN_CLIENT_KEY": key["Authorization"].removeprefix("Bearer ")}
    process = await asyncio.create_subprocess_exec(
        PYTHON, "-c", ASK, asked, stdout=asyncio.subprocess.PIPE, env=environment
    )
    printed, _ = await process.communicate()
    answers = [json.loads(line) for line in printed.splitlines()]
    assert len(answers) == len(conversations)
    renderer = load_renderer(ModelConfig(path=str(warm_start)), "auto")
    async with aiohttp.ClientSession(headers=key) as session:
        for messages, (prompt, completion, logprobs) in zip(conversations, answers, strict=True):
            assert prompt == renderer.open(messages, [])
            params = {"temperature": 0.0, "max_tokens": 40, "logprobs": 0}
            body = {"token_ids": prompt, "sampling_params": params, "model": "policy"}
            async with session.post(warm_server + "/inference/v1/generate", json=body) as answer:
                (choice,) = (await answer.json())["choices"]
            assert completion == choice["token_ids"]
            assert logprobs == pytest.approx([entry["logprob"] for entry in choice["logprobs"]["content"]], abs=1e-4)
