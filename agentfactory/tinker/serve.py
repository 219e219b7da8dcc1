"""`agentfactory serve RECIPE --as tinker`: trainer and routes, in the process that has started the inference server."""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from aiohttp import web

from agentfactory.base.errors import SettingError
from agentfactory.base.http.connections import HEADER_SECONDS, ConnectionLimit, log_few, most_connections
from agentfactory.base.http.key_guard import listen, server_key
from agentfactory.launching.child_processes import POLL_SECONDS
from agentfactory.launching.run_folder import Hold
from agentfactory.recipe.composition import display
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.inference.vllm import TABLE_ADAPTERS
from agentfactory.rollout.text.tokenizer import load_tokenizer
from agentfactory.tinker.checkpoints import Checkpoints
from agentfactory.tinker.samplers import Samplers
from agentfactory.tinker.service import Base, Service
from agentfactory.tinker.training import ALPHA, Trainer
from agentfactory.trainers.config import LossConfig
from agentfactory.trainers.processes.accelerator import make_accelerator
from agentfactory.trainers.sync.backends import ADAPTER_ROUTES
from agentfactory.trainers.sync.canary import CONTEXT_TOKENS, Canary, canary_rows
from agentfactory.trainers.sync.server_control import ServerControl
from agentfactory.trainers.sync.weight_sync import SyncReport, base_model
from agentfactory.trainers.update.learner import Learner


def prepared(recipe: Recipe) -> Recipe:
    """Return the recipe with what its server needs. Raises SettingError if it cannot be served."""
    lora, server = recipe.model.lora, recipe.server
    if lora is None:
        told = "set model.lora.rank to the largest that clients may ask for, such as 32"
        raise SettingError("model.lora", "missing, and models are adapters here", told)
    for field, value in lora.model_dump(by_alias=True, exclude={"rank", "quantization"}, exclude_defaults=True).items():
        fix = f"remove it: clients choose rank and modules, and alpha is {ALPHA}"
        raise SettingError(f"model.lora.{field}", f"got {value!r}", fix)
    if server.engine == "sglang":
        raise SettingError("server.engine", "got 'sglang', which serves no adapters here", "use embedded or vllm")
    if server.urls:
        raise SettingError("server.url", "got an address, and the service starts its own server", "remove it")
    if recipe.train.processes > 1:
        raise SettingError("train.processes", f"got {recipe.train.processes}, and the service trains in one", "set 1")
    if server.engine != "vllm":
        return recipe
    # for train_unembed
    options = server.vllm.model_copy(update={"args": [*server.vllm.args, TABLE_ADAPTERS]})
    return recipe.model_copy(update={"server": server.model_copy(update={"options": options})})


async def serve(
    recipe: Recipe, url: str, port: int, say: Callable[[str], None], check_server: Callable[[], None]
) -> None:
    """Serve at `port` until this is cancelled, or `check_server` raises. `url` is the inference server's."""
    home = recipe.output / "tinker"
    home.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(Hold(home)).take(make=True)
        listener = stack.enter_context(listen("127.0.0.1", port, "--port"))
        host, free = listener.getsockname()[:2]
        key = f"tml-{stack.enter_context(server_key(host, free, None))[0]}"
        async with InferenceClient(url, recipe.server.api_key_env, recipe.server.retry_seconds) as client:
            await client.check_routes()
            service = await asyncio.to_thread(_make, recipe, url, client, home, key)
            runner = await _answer(service.application(), listener)
            say(f"tinker http://{host}:{free} (checkpoints: {display(home)})")
            say(f"  export TINKER_BASE_URL=http://{host}:{free}")
            say(f"  export TINKER_API_KEY={key}")
            try:
                while True:
                    check_server()
                    await asyncio.sleep(POLL_SECONDS)
                    await service.sweep()
            finally:
                for line in await service.close():
                    say(line)
                await runner.cleanup()


async def _answer(application: web.Application, listener: socket.socket) -> web.AppRunner:
    log_few(logging.getLogger("aiohttp.server"))
    runner = web.AppRunner(
        application, access_log=None, keepalive_timeout=HEADER_SECONDS, auto_decompress=False, shutdown_timeout=2
    )
    await runner.setup()
    assert runner.server is not None
    admit = partial(ConnectionLimit(most_connections()).admit, runner.server)
    await asyncio.get_running_loop().create_server(admit, sock=listener, backlog=1024)
    return runner


def _make(recipe: Recipe, url: str, client: InferenceClient, home: Path, key: str) -> Service:
    """Load the trainer, prove that the server has its base, and make the service."""
    model, lora, path = recipe.model, recipe.model.lora, Path(recipe.model.path)
    assert lora is not None
    # the Learner's own adapter stays as it begins: without effect
    small = model.model_copy(update={"lora": lora.model_copy(update={"rank": 1})})
    # losses are the clients': no critic, reference or teacher
    train = recipe.train.model_copy(update={"algorithm": "sft", "loss": LossConfig()})
    own = recipe.model_copy(update={"model": small, "train": train, "teacher": None})
    learner, tokenizer = Learner(own, make_accelerator(own)), load_tokenizer(model.path)
    server = ServerControl(url, recipe.server.api_key_env)
    server.require(ADAPTER_ROUTES)
    ordinary = [token for token in range(len(tokenizer)) if token not in {*tokenizer.all_special_ids}]
    longest = recipe.server.max_model_len
    rows = canary_rows(ordinary, longest - 1, recipe.seed, CONTEXT_TOKENS[recipe.server.engine])
    canary = Canary([server], rows, model.dtype, rounded=bool(recipe.rounding))
    name = base_model([server])
    canary.prove(SyncReport(0, name, name, 0, 0.0, ""), canary.trainer_scores(learner.policy))
    folder = path.resolve() if path.is_dir() else path
    shown, architecture = "/".join(folder.parts[-2:]), type(learner.policy.network).__name__
    base = Base(str(folder), shown, frozenset({model.path, str(folder), folder.name}), longest, architecture)
    samplers = Samplers(client, server, canary, name, recipe.max_loras, longest)
    return Service(base, Trainer(learner, canary, lora.rank), samplers, Checkpoints(home, shown), key)
