"""A proxy between trainer and inference server that silently breaks one thing, and a small trainer whose syncs it
breaks."""

import asyncio
import json
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch
from accelerate import Accelerator
from aiohttp import web
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentfactory.rollout.inference.http_transport import authorization
from agentfactory.trainers.batches.batch import TrainingRow
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.policy import load_policy
from agentfactory.trainers.sync.adapter_sync import LoraSync
from agentfactory.trainers.sync.canary import CONTEXT_TOKENS, Canary, canary_rows
from agentfactory.trainers.sync.file_sync import FileSync
from agentfactory.trainers.sync.proven_push import push_proven
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from agentfactory.trainers.sync.weight_sync import WeightSync
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.policy_update import update_policy

VOCABULARY = 256
RATES = {False: 1e-5, True: 1e-4}
"""Usual learning rates of full weights and of adapters."""

Json = dict[str, Any]
Forward = Callable[[Json | None], Awaitable[web.Response]]
"""Forwards the request, with another body if one is given, and returns the server's response."""
Tamper = Callable[[str, Json, Forward], Awaitable[web.Response]]
"""(path with query, body, forward) -> response to the trainer."""


@contextmanager
def sabotaged(upstream: str, tamper: Tamper) -> Iterator[str]:
    """Run a proxy in front of `upstream` in a separate thread, and yield its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[web.AppRunner, aiohttp.ClientSession]:
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

        async def handle(request: web.Request) -> web.Response:
            given = await request.read()

            async def forward(body: Json | None = None) -> web.Response:
                data = given if body is None else json.dumps(body).encode()
                return await send(session, request.method, upstream + request.path_qs, data)

            return await tamper(request.path_qs, json.loads(given or b"{}"), forward)

        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, session

    runner, session = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        asyncio.run_coroutine_threadsafe(session.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def send(session: aiohttp.ClientSession, method: str, url: str, data: bytes) -> web.Response:
    """Send a request to a real server and return its response."""
    headers = {"Content-Type": "application/json", **authorization(url, None)}
    async with session.request(method, url, data=data, headers=headers) as answer:
        return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)


async def nothing(path: str, body: Json, forward: Forward) -> web.Response:
    """Forward everything unchanged."""
    return await forward(None)


def sent_file(body: Json) -> Path:
    """Return the weight file in the folder that a request names: a small model has only one."""
    [file] = Path(body["update_info"]["path"]).iterdir()
    return file


def stale_file(folder: Path) -> Tamper:
    """After the first version, make the server read a copy of the first file."""
    first = folder / "first.safetensors"

    async def tamper(path: str, body: Json, forward: Forward) -> web.Response:
        if path != "/update_weights":
            return await forward(None)
        if not first.exists():
            first.write_bytes(sent_file(body).read_bytes())
        return await forward({"update_info": {"path": str(first)}})

    return tamper


async def cache_left(path: str, body: Json, forward: Forward) -> web.Response:
    """Never drop the prefix cache, but report that it was."""
    if path.startswith("/reset_prefix_cache"):
        return web.json_response({"success": True})
    return await forward(None)


def stale_replica(folder: Path, replica: str) -> Tamper:
    """Act as a balancer of two servers: the second one generates, reads its weights from a disk that keeps the first
    file, and never gets a request for its checksums."""
    to_second = stale_file(folder)

    async def tamper(path: str, body: Json, forward: Forward) -> web.Response:
        async def to_replica(other: Json | None) -> web.Response:
            async with aiohttp.ClientSession() as session:
                data = json.dumps(body if other is None else other).encode()
                return await send(session, "POST", replica + path, data)

        if path == "/inference/v1/generate":
            return await to_replica(None)
        controls = ("/init", "/pause", "/start", "/update", "/finish", "/reset", "/resume")
        if path.startswith(controls):
            answer = await to_second(path, body, to_replica)
            assert answer.status == 200, answer.text
        return await forward(None)

    return tamper


async def never_loaded(path: str, body: Json, forward: Forward) -> web.Response:
    """Report that an adapter is loaded, without loading it."""
    if path == "/v1/load_lora_adapter":
        return web.Response(text="Success: LoRA adapter added successfully.")
    return await forward(None)


def old_folder() -> Tamper:
    """Give each new name the folder of the first adapter."""
    paths: list[str] = []

    async def tamper(path: str, body: Json, forward: Forward) -> web.Response:
        if path != "/v1/load_lora_adapter":
            return await forward(None)
        paths.append(body["lora_path"])
        return await forward({**body, "lora_path": paths[0]})

    return tamper


def old_bytes() -> Tamper:
    """Make the server read the right path on a disk that still has the first adapter's bytes."""
    first: list[bytes] = []

    async def tamper(path: str, body: Json, forward: Forward) -> web.Response:
        if path != "/v1/load_lora_adapter":
            return await forward(None)
        file = Path(body["lora_path"]) / "adapter_model.safetensors"
        current = file.read_bytes()
        first.append(current)
        file.write_bytes(first[0])
        answer = await forward(None)
        file.write_bytes(current)
        return answer

    return tamper


async def not_applied(path: str, body: Json, forward: Forward) -> web.Response:
    """Load and list the adapter, but generate with the base model."""
    if path == "/inference/v1/generate":
        return await forward({**body, "model": "policy"})
    return await forward(None)


class Run:
    """A trainer, its sync and its canary."""

    tokens = CONTEXT_TOKENS["embedded"]
    """Tokens of the canary's contexts."""

    def __init__(
        self,
        name: str,
        model: Path,
        folder: Path,
        url: str,
        adapters: bool,
        dtype: str = "float32",
        learning_rate: float | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        """`learning_rate`: None for RATES. `accelerator`: None for one on the CPU."""
        self.model, self.folder, self.prefix = model, folder, f"{name}-v"
        folder.mkdir(parents=True, exist_ok=True)
        section = {"path": str(model), "dtype": dtype, "lora": {"rank": 8} if adapters else None}
        train = {"steps": 1, "learning_rate": learning_rate or RATES[adapters]}
        self.recipe = TrainRecipe.model_validate({"model": section, "train": train})
        self.learner = Learner(self.recipe, accelerator or Accelerator(cpu=True))
        draw = random.Random(1)
        rows = [
            TrainingRow(
                token_ids=[draw.randrange(VOCABULARY) for _ in range(48)],
                targets=list(range(8, 48)),
                streams={
                    "behaviour": [-5.0] * 40,
                    "advantage": [1.0 if number % 2 else -1.0] * 40,
                    "weight": [1.0] * 40,
                    "mixed": [0.0] * 40,
                },
            )
            for number in range(8)
        ]
        self.batch = self.learner.deal(rows)
        servers = [ServerControl(url)]
        self.sync: WeightSync = (
            LoraSync(servers, folder / "sync", self.prefix, keep=2)
            if adapters
            else FileSync(servers, folder / "sync", self.prefix)
        )
        self.canary = Canary(servers, canary_rows(range(VOCABULARY), longest=159, length=self.tokens), dtype)
        self.metrics: list[dict[str, float]] = []
        """The metrics of each successful sync."""

    def step(self, version: int) -> str:
        """Update the weights and sync them. Return the error, or "" if there is none."""
        if version:
            self.train()
        try:
            self.publish(version)
        except SyncError as error:
            return str(error)
        return ""

    def push_base(self) -> None:
        """Load the current weights, without a proof."""
        self.sync.push(0, self.learner.policy, self.learner.policy.gather())
        self.sync.close()

    def train(self) -> None:
        """Update the weights."""
        update_policy(self.learner, self.batch, self.recipe)

    def publish(self, version: int) -> None:
        """Sync the current weights. Raises SyncError."""
        policy = self.learner.policy
        scores = self.canary.trainer_scores(policy)
        _, metrics = push_proven(self.sync, self.canary, version, policy, policy.gather(), scores)
        self.metrics.append(metrics)

    def other_weights(self) -> Path:
        """Write full weights of another run."""
        state, file = load_file(self.folder / "base.safetensors"), self.folder / "others.safetensors"
        save_file({name: value * 1.02 for name, value in state.items()}, file, metadata={"format": "pt"})
        return file

    def other_adapter(self) -> Path:
        """Write an adapter of another run."""
        recipe = TrainRecipe.model_validate({**self.recipe.model_dump(), "seed": 1})
        policy = load_policy(recipe)
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.02)
        policy.save_adapter(self.folder / "others", policy.gather())
        return self.folder / "others"


def make_model(folder: Path) -> Path:
    """Create a Qwen3 of three million parameters, with weights of the magnitude of pretrained models."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        initializer_range=0.02,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
