"""The process that plays environments of verifiers. It runs in the Python that has verifiers, without AgentFactory.

`bridge.py rows` reads the settings of a source from stdin, and writes its tasks to stdout. `bridge.py play SOCKET`
plays a task for each line of the socket, concurrently, and answers with its reward.
"""

import asyncio
import json
import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from itertools import islice
from typing import Any

VERSION = "0.4"
_LONGEST_LINE = 1 << 28


class Refused(Exception):
    """Invalid settings: the field, the problem and the fix."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # environments that print would mix their output with the answers
    os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    if sys.argv[1] == "play":
        asyncio.run(_play(sys.argv[2]))
        return
    try:
        found: dict[str, Any] = {"rows": _rows(json.load(sys.stdin))}
    except Refused as refused:
        found = {"refused": refused.args}
    json.dump(found, answers)
    answers.flush()
    os._exit(0)  # do not wait for threads of the environment


# ---- settings


def _rows(settings: dict[str, Any]) -> list[dict[str, Any]]:
    player = Player(settings)
    first, count = settings["first_task"], settings["tasks"]
    try:
        tasks = list(islice(player.env.taskset, first, None if count is None else first + count))
    except Exception as error:  # boundary: user code
        raise Refused(
            "id",
            f"got {settings['id']!r}, whose tasks cannot be loaded: {_described(error)}",
            "give it what it needs (its data, the network, a key), or correct its options",
        ) from error
    if not tasks:
        raise Refused("first_task", f"got {first}, but {settings['id']} has no task from there on", "lower it")
    try:
        return [
            {"question": task.data.prompt_text or task.data.description or task.data.name or "", "data": data}
            for task in tasks
            for data in [task.data.model_dump(mode="json")]
        ]
    except Exception as error:  # boundary: user code
        problem = f"got {settings['id']!r}, whose tasks cannot be written as JSON: {_described(error)}"
        raise Refused("id", problem, "keep only JSON values in its TaskData") from error


def _load(settings: dict[str, Any]) -> "tuple[Any, str]":
    """Return the environment, and the name of the seat that the policy plays."""
    fix = f"{sys.executable} -m pip install 'verifiers~={VERSION}.0'"
    try:
        import verifiers
        import verifiers.v1 as vf
    except ImportError as error:
        raise Refused("python", f"{sys.executable} cannot import verifiers: {error}", fix) from error
    if not verifiers.__version__.startswith(f"{VERSION}."):
        raise Refused("python", f"{sys.executable} has verifiers {verifiers.__version__}", fix)
    _import(settings["id"])
    given = {**settings["env"], "taskset": {**settings["options"], "id": settings["id"]}}
    config = _resolved(given)
    seat = _add_defaults(given, config, settings["max_turns"])
    config = _resolved(given)
    _check_keys(config)
    try:
        env = vf.load_environment(config)
    except Exception as error:  # boundary: user code
        raise Refused("id", f"got {settings['id']!r}: {_described(error)}", "correct its options or env") from error
    excluded = [name for name, field in _data_type(env).model_fields.items() if field.exclude]
    if excluded:
        problem = f"got {settings['id']!r}, whose tasks do not serialize {', '.join(excluded)}"
        raise Refused("id", problem, "remove exclude=True from these fields")
    ours = sorted(id for name, id in _harnesses(config) if name.startswith("verifiers."))
    if ours and shutil.which("uv") is None:
        problem = f"{sys.executable} has no uv, with which verifiers starts the harness {ours[0]}"
        raise Refused("python", problem, f"{sys.executable} -m pip install uv")
    return env, seat


def _harnesses(config: Any) -> Iterator[tuple[str, str]]:
    import verifiers.v1 as vf

    for harness in config.agent_harnesses().values():
        yield vf.import_harness(harness.id).__name__, harness.id


def _import(name: str) -> None:
    import verifiers.v1 as vf

    try:
        vf.import_taskset(name)
    except ModuleNotFoundError as error:
        # without a cause, a package of verifiers itself has failed
        lacking = getattr(error.__cause__ or error, "name", None)
        module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
        if lacking in (None, module, f"verifiers.v1.tasksets.{module}"):
            fix = "install its package into this Python, or set folder to the one that has its module"
            raise Refused("id", f"got {name!r}; {sys.executable} has no module {module}", fix) from error
        package, _, inner = lacking.partition(".")
        problem = f"got {name!r}, which needs the package {lacking}"
        fix = f"{sys.executable} -m pip install {package}"
        if inner and find_spec(package) is not None:
            problem += f", and the installed {package} has none"
            fix = f"install the version that it needs; {sys.executable} -m pip check names it"
        raise Refused("id", problem, fix) from error
    except Exception as error:  # boundary: user code
        fix = "correct it, or install what it needs"
        raise Refused("id", f"got {name!r}, which fails on import: {_described(error)}", fix) from error


def _resolved(given: dict[str, Any]) -> Any:
    import verifiers.v1 as vf
    from pydantic import ValidationError

    try:
        return vf.resolve_env_config(json.loads(json.dumps(given)))
    except ValidationError as error:
        first = error.errors()[0]
        known = [str(part) for part in first["loc"]]
        field = _field(known)
        got = f"got {first['input']!r:.200}: " if first["type"] != "missing" else ""
        raise Refused(field, f"{got}{first['msg']}", "correct it (`vf-eval ID --help` lists the fields)") from error
    except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
        raise Refused("env", f"got {given!r:.300}: {_described(error)}", "correct it") from error


def _field(path: list[str]) -> str:
    """Return the field of the source that sets a field of verifiers' configuration."""
    return ".".join(["options", *path[1:]] if path[:1] == ["taskset"] else ["env", *path])


def _add_defaults(given: dict[str, Any], config: Any, max_turns: int | None) -> str:
    """Add the defaults of this machine to the seats. Return the name of the seat that the policy plays."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields

    seats = agent_config_fields(config)
    policies = [name for name, seat in seats.items() if seat.client is None]
    if len(policies) != 1:
        known = ", ".join(seats)
        if not policies:
            raise Refused("env", f"every seat ({known}) has a client of its own", "remove that of the policy's seat")
        problem = f"the policy can play one seat, but {', '.join(policies)} have no client of their own"
        raise Refused("env", problem, "give each of the others a model and a client (base_url, api_key_var)")
    bare = vf.default_agent_harness(config.taskset.id).id == "bash"
    for name, seat in seats.items():
        own = given.setdefault(name, {})
        # verifiers' own defaults are a shell in a sandbox of Prime Intellect
        if "runtime" not in own and isinstance(seat.runtime, vf.PrimeConfig):
            own["runtime"] = {"type": "subprocess"}
        if "harness" not in own and seat.harness is None and bare:
            own["harness"] = {"id": "null"}
    (policy,) = policies
    limits = [limit for limit in (seats[policy].max_turns, max_turns) if limit is not None]
    given[policy]["max_turns"] = min(limits, default=None)
    return policy


def _check_keys(config: Any) -> None:
    """Raise Refused if a model or sandbox that the environment uses needs a key that is not set."""
    from urllib.parse import urlsplit

    import verifiers.v1 as vf
    from verifiers.v1.configs.client import resolve_api_key
    from verifiers.v1.utils.prime import load_prime_config

    for path, part in _parts(config, []):
        if isinstance(part, vf.BaseClientConfig):
            local = urlsplit(part.base_url).hostname in ("127.0.0.1", "localhost", "::1")
            name, needed = part.api_key_var, not local and resolve_api_key(part) == "EMPTY"
            what = f"the model at {part.base_url}"
        elif isinstance(part, vf.PrimeConfig):
            name = "PRIME_API_KEY"
            needed = not (os.environ.get(name) or load_prime_config().get("api_key"))
            what = "a sandbox of Prime Intellect"
        else:
            continue
        if needed:
            problem = f"{what} needs a key, but the variable {name} is not set"
            raise Refused(
                _field(path), problem, f"export {name}=KEY, and name it in the recipe: env: [{name}]; or use another"
            )


def _parts(value: Any, path: list[str]) -> Iterator[tuple[list[str], Any]]:
    from pydantic import BaseModel

    if isinstance(value, BaseModel):
        yield path, value
        for name, part in value:
            yield from _parts(part, [*path, name])
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _parts(part, [*path, str(number)])


def _data_type(env: Any) -> Any:
    return type(env.taskset).task_type().data_type()


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


# ---- playing


class Player:
    """An environment, and the seat that the policy plays. Raises Refused if a setting is invalid."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.env, self._seat = _load(settings)

    async def play(self, data: dict[str, Any], url: str, key: str, model: str) -> dict[str, Any]:
        """Play a task with the model at `url`. Return its reward, or the error that ended it."""
        import verifiers.v1 as vf

        task = type(self.env.taskset).task_type()(
            _data_type(self.env).model_validate(data), self.env.config.taskset.task
        )
        client = vf.EvalClientConfig(base_url=url, api_key_var="AGENTFACTORY_UNSET", headers={"x-api-key": key})
        (slot,) = self.env.slots(task)
        episode = await self.env.run_slot(slot, vf.ModelContext(model=model, client=client))
        traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.name == self._seat]
        failed = [trace for trace in episode.traces if not trace.ok]
        if not episode.ok:
            error = next((trace.last_error for trace in failed if trace.last_error), episode.last_error)
            stopped = next((trace.stop_condition for trace in failed), "") or "it gives no reason"
            told = f"{error.type}: {error.message}" if error is not None else f"it stopped: {stopped}"
            # neither the model nor the environment's code is to blame for these
            blameless = ("SandboxError", "ToolsetError", "InterceptionError", "TunnelError")
            return {"failed": told, "infrastructure": error is not None and error.type in blameless}
        if len(traces) != 1:
            return {
                "failed": f"its episode has {len(traces)} runs of {self._seat}; a chain is one",
                "infrastructure": False,
            }
        (trace,) = traces
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {
            "reward": trace.reward,
            "metrics": {**scores, **metrics, "truncated": float(trace.is_truncated)},
            "answer": trace.last_reply,
        }


async def _play(path: str) -> None:
    reader, writer = await asyncio.open_unix_connection(path, limit=_LONGEST_LINE)
    running: dict[int, asyncio.Task[dict[str, Any]]] = {}

    def answer(found: dict[str, Any]) -> None:
        writer.write(json.dumps(found).encode() + b"\n")

    def ended(number: int, task: "asyncio.Task[dict[str, Any]]") -> None:
        del running[number]
        if task.cancelled():
            answer({"number": number, "failed": "it was cancelled", "infrastructure": True})
        elif error := task.exception():
            traceback.print_exception(error)
            answer({"number": number, "failed": _described(error), "infrastructure": False})
        else:
            answer({"number": number, **task.result()})

    try:
        player = Player(json.loads(await reader.readline()))
    except Refused as refused:
        answer({"refused": refused.args})
        await writer.drain()
        return
    async with player.env.serving():
        answer({"ready": True})
        while line := await reader.readline():
            message = json.loads(line)
            number = message.pop("number")
            if "cancel" in message:
                if number in running:
                    running[number].cancel()
            else:
                task = running[number] = asyncio.create_task(player.play(**message))
                task.add_done_callback(partial(ended, number))
        for task in [*running.values()]:
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)


if __name__ == "__main__":
    main()
