"""`agentfactory serve RECIPE --as tinker`: the trainer and the routes, in the process that started the inference server."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from agentfactory.base.errors import SettingError
from agentfactory.base.http.key_guard import listen, server_key
from agentfactory.base.run_notices import doing
from agentfactory.launching.child_processes import POLL_SECONDS
from agentfactory.launching.run_folder import Hold, RunFolder
from agentfactory.launching.served_weights import Served
from agentfactory.recipe.composition import display
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.text.tokenizer import load_tokenizer
from agentfactory.tinker.checkpoints import Checkpoints
from agentfactory.tinker.samplers import Samplers
from agentfactory.tinker.service import Base, Service
from agentfactory.tinker.service import listen as answer
from agentfactory.tinker.training import Trainer
from agentfactory.trainers.networks.lora import table_of
from agentfactory.trainers.processes.accelerator import make_accelerator
from agentfactory.trainers.sync.backends import ADAPTER_ROUTES
from agentfactory.trainers.sync.canary import CONTEXT_TOKENS, Canary, canary_rows
from agentfactory.trainers.sync.server_control import ServerControl
from agentfactory.trainers.sync.weight_sync import SyncReport, base_model
from agentfactory.trainers.update.learner import Learner

_SWEEP_SECONDS = 30.0


def check(recipe: Recipe) -> None:
    """Raise SettingError if the recipe cannot be served."""
    lora = recipe.model.lora
    if lora is None:
        fix = "set model.lora.rank to the largest that clients may ask for, such as 32"
        raise SettingError("model.lora", "missing, and models are adapters here", fix)
    for field in ("alpha", "from_", "trainable_tokens"):
        if getattr(lora, field) is not None:
            name = f"model.lora.{field.rstrip('_')}"
            raise SettingError(name, f"got {getattr(lora, field)!r}, and clients decide on their adapters", "remove it")
    if recipe.server.engine == "sglang":
        raise SettingError("server.engine", "got 'sglang', which serves no adapters here", "use embedded or vllm")
    if recipe.server.urls:
        raise SettingError("server.url", "got an address, and the service starts its own server", "remove it")
    if recipe.train.processes > 1:
        raise SettingError("train.processes", f"got {recipe.train.processes}, and the service trains in one", "set 1")


async def serve(
    served: Served, url: str, folder: RunFolder, port: int, say: Callable[[str], None], check_server: Callable[[], None]
) -> None:
    """Serve until this is cancelled, or `check_server` raises. `url` is the inference server's."""
    recipe, home = served.recipe, served.recipe.output / "tinker"
    with ExitStack() as stack:
        home.mkdir(parents=True, exist_ok=True)
        hold = stack.enter_context(Hold(home))
        hold.take()
        listener = stack.enter_context(listen("127.0.0.1", port, "--port"))
        host, free = listener.getsockname()[:2]
        key = f"tml-{stack.enter_context(server_key(host, free, None))[0]}"
        server = ServerControl(url, recipe.server.api_key_env)
        await asyncio.to_thread(server.require, ADAPTER_ROUTES)
        client = InferenceClient(url, recipe.server.api_key_env, recipe.server.retry_seconds)
        async with client:
            await client.check_routes()
            service = await asyncio.to_thread(_make, recipe, server, client, home, key)
            runner = await answer(service.application(), listener)
            say(f"tinker http://{host}:{free} (checkpoints: {display(home)})")
            say(f"  export TINKER_BASE_URL=http://{host}:{free}")
            say(f"  export TINKER_API_KEY={key}")
            try:
                await _watch(service, check_server)
            finally:
                await runner.cleanup()
                await service.close()


async def _watch(service: Service, check_server: Callable[[], None]) -> None:
    waited = 0.0
    while True:
        check_server()
        await asyncio.sleep(POLL_SECONDS)
        waited += POLL_SECONDS
        if waited >= _SWEEP_SECONDS:
            waited = 0.0
            await service.sweep()


def _make(recipe: Recipe, server: ServerControl, client: InferenceClient, home: Path, key: str) -> Service:
    """Load the trainer, prove that the server has the same base, and make the service."""
    assert recipe.model.lora is not None
    path = recipe.model.path
    # the Learner's own adapter is the base for the canary, and nothing else
    small = recipe.model.lora.model_copy(update={"rank": 1})
    own = recipe.model_copy(update={"model": recipe.model.model_copy(update={"lora": small})})
    learner = Learner(own, make_accelerator(own))
    tokenizer = load_tokenizer(path)
    special = {*tokenizer.all_special_ids}
    vocabulary = [token for token in range(len(tokenizer)) if token not in special]
    rows = canary_rows(vocabulary, recipe.server.max_model_len - 1, recipe.seed, CONTEXT_TOKENS[recipe.server.engine])
    canary = Canary([server], rows, recipe.model.dtype, rounded=bool(recipe.rounding))
    name = base_model([server])
    with doing("proving that the server has the trainer's base"):
        canary.prove(SyncReport(0, name, name, 0, 0.0, ""), canary.trainer_scores(learner.policy))
    folder = Path(path)
    whole = str(folder.resolve()) if folder.is_dir() else path
    parts = folder.resolve().parts if folder.is_dir() else folder.parts
    shown = "/".join(parts[-2:])
    base = Base(
        folder=whole,
        name=shown,
        names=frozenset({path, whole, shown, parts[-1]}),
        context=recipe.server.max_model_len,
        architecture=type(learner.policy.network).__name__,
    )
    entries = table_of(learner.policy.network.get_output_embeddings()).shape[0]
    samplers = Samplers(client, server, canary, name, recipe.max_loras, recipe.server.max_model_len, entries)
    trainer = Trainer(learner, canary, recipe.model.lora.rank)
    return Service(base, trainer, samplers, Checkpoints(home, shown), key)


