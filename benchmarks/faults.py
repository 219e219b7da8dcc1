"""Faults in the transfer of weights from trainer to server: does the proof stop each before the next step?

A small model is trained at a steady, low learning rate, and its weights are synced to a real server after each
update. A proxy between trainer and server, or a second process, breaks one thing at sync 4, and responds as if nothing
had happened. The fault is caught if the broken sync raises an error (for weights loaded between two syncs: the next
one). Two runs of 50 syncs without a fault follow, one with full weights and one with adapters: each error there is a
false alarm.

The default is the embedded engine in float32. `--vllm PYTHON` uses real vLLM, started with that Python.

The last line is JSON: `faults`, how many of them were `caught` at that sync, and the `false_alarms` in the honest
syncs.

    python benchmarks/faults.py [--quick] [--vllm .venv-vllm/bin/python]
"""

import argparse
import asyncio
import json
import tempfile
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from aiohttp import web
from sabotage import Forward, Json, Run, make_model, sabotaged, sent_file
from safetensors.torch import load_file, save_file

from agentfactory.launching.start_server import serve
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.inference.http_transport import authorization
from agentfactory.trainers.sync.canary import CONTEXT_TOKENS
from agentfactory.trainers.sync.server_control import ServerControl

BROKEN = 4
"""The sync that is broken."""
HONEST = 50
GENERATE = "/inference/v1/generate"


class Fault:
    """A proxy's behaviour; `broken` is true from the broken sync on. This one breaks nothing."""

    adapters = False

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.broken = False
        self.paths: list[Path] = []

    async def tamper(self, path: str, body: Json, forward: Forward) -> web.Response:
        """Answer a request of the trainer."""
        if path == "/update_weights":
            self.paths.append(self.kept(sent_file(body)))
        elif path == "/v1/load_lora_adapter":
            self.paths.append(self.kept(Path(body["lora_path"]) / "adapter_model.safetensors"))
        return await (self.act if self.broken else self.forward)(path, body, forward)

    def kept(self, file: Path) -> Path:
        """Keep a copy of the weights of each version: the trainer removes old ones."""
        copy = self.folder / f"version-{len(self.paths)}.safetensors"
        copy.write_bytes(file.read_bytes())
        return copy

    async def forward(self, path: str, body: Json, forward: Forward) -> web.Response:
        """Break nothing."""
        return await forward(None)

    act = forward

    def between(self, run: "Run") -> None:
        """Act as another process after the sync before the broken one."""


class StaleWeights(Fault):
    """full weights: the server reads the file of the previous version"""

    async def act(self, path: str, body: Json, forward: Forward) -> web.Response:
        stale = {"update_info": {"path": str(self.paths[-2])}} if path == "/update_weights" else None
        return await forward(stale)


class StaleReplica(Fault):
    """full weights: loaded and proven, but the replica that generates has the previous version"""

    async def act(self, path: str, body: Json, forward: Forward) -> web.Response:
        answer = await forward(None)
        if path == "/weight_checker":
            label = ServerControl(self.url).get("/weight_info")["weight_version"]
            await asyncio.to_thread(push, self.url, self.paths[-2], label)
        return answer


class TornFile(Fault):
    """full weights: the second half of the file is from the previous version"""

    async def act(self, path: str, body: Json, forward: Forward) -> web.Response:
        if path == "/update_weights":
            file = sent_file(body)
            new, old = file.read_bytes(), self.paths[-2].read_bytes()
            file.write_bytes(new[: len(new) // 2] + old[len(new) // 2 :])
        return await forward(None)


class CutFile(Fault):
    """full weights: the file ends in the middle"""

    async def act(self, path: str, body: Json, forward: Forward) -> web.Response:
        if path == "/update_weights":
            file = sent_file(body)
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        return await forward(None)


class WrongVersionEchoed(Fault):
    """full weights: the server reports the previous version"""

    async def act(self, path: str, body: Json, forward: Forward) -> web.Response:
        if path == "/finish_weight_update":
            return await forward({"weight_version": body["weight_version"][:-1] + str(BROKEN - 1)})
        return await forward(None)


class LostUpdate(Fault):
    """full weights: the update is answered with 200 but not done"""

    async def act(self, path: str, body: Json, forward: Forward) -> web.Response:
        return web.json_response({}) if path == "/update_weights" else await forward(None)


class StaleCache(Fault):
    """full weights: the prefix cache of the previous version is not dropped"""

    async def act(self, path: str, body: Json, forward: Forward) -> web.Response:
        if path.startswith("/reset_prefix_cache"):
            return web.json_response({"success": True})
        return await forward(None)


class AnotherRun(Fault):
    """full weights: another run pushes its weights into the server, under its own name"""

    def label(self) -> str:
        return f"another-run-v{BROKEN}"

    def between(self, run: "Run") -> None:
        push(self.url, run.other_weights(), self.label())


class AnotherRunInDisguise(AnotherRun):
    """full weights: another process pushes its weights, under our version's name"""

    def label(self) -> str:
        return str(ServerControl(self.url).get("/weight_info")["weight_version"])


class StaleAdapter(Fault):
    """adapter: the right folder is loaded, from a disk that still has the bytes of the previous version"""

    adapters = True

    async def act(self, path: str, body: Json, forward: Forward) -> web.Response:
        if path != "/v1/load_lora_adapter":
            return await forward(None)
        file = Path(body["lora_path"]) / "adapter_model.safetensors"
        new = file.read_bytes()
        file.write_bytes(self.paths[-2].read_bytes())
        answer = await forward(None)
        file.write_bytes(new)
        return answer


class OldAdapterUnderNewName(Fault):
    """adapter: the new name gets the folder of the previous version"""

    adapters = True

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(url, folder)
        self.folders: list[str] = []

    async def forward(self, path: str, body: Json, forward: Forward) -> web.Response:
        if path == "/v1/load_lora_adapter":
            self.folders.append(body["lora_path"])
        return await forward(None)

    async def act(self, path: str, body: Json, forward: Forward) -> web.Response:
        stale = {**body, "lora_path": self.folders[-1]} if path == "/v1/load_lora_adapter" else None
        return await forward(stale)


class AbsentAdapter(Fault):
    """adapter: the load is answered with 200 but not done"""

    adapters = True

    async def act(self, path: str, body: Json, forward: Forward) -> web.Response:
        if path == "/v1/load_lora_adapter":
            return web.Response(text="Success: LoRA adapter added successfully.")
        return await forward(None)


class UnusedAdapter(Fault):
    """adapter: loaded and listed, but the base model generates"""

    adapters = True

    async def act(self, path: str, body: Json, forward: Forward) -> web.Response:
        return await forward({**body, "model": "policy"} if path == GENERATE else None)


class MergedInBfloat16(Fault):
    """adapter: merged into the base weights in bfloat16 and unmerged: the base stays rounded"""

    adapters = True

    async def act(self, path: str, body: Json, forward: Forward) -> web.Response:
        answer = await forward(None)
        if path == "/v1/load_lora_adapter":
            base, adapter = load_file(self.folder / "base.safetensors"), load_file(self.paths[-1])
            config = json.loads((Path(body["lora_path"]) / "adapter_config.json").read_text())
            scale = config["lora_alpha"] / config["r"]
            for name in [name for name in adapter if name.endswith(".lora_A.weight")]:
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                change = adapter[name.replace("lora_A", "lora_B")] @ adapter[name] * scale
                base[f"{module}.weight"] = (base[f"{module}.weight"] + change).bfloat16().float() - change
            save_file(base, self.folder / "rounded.safetensors", metadata={"format": "pt"})
            await asyncio.to_thread(push, self.url, self.folder / "rounded.safetensors", "default")
        return answer


class AnothersAdapter(Fault):
    """adapter: another process loads its adapter under our name"""

    adapters = True

    def between(self, run: "Run") -> None:
        name, folder = f"{run.prefix}{BROKEN - 1}", run.other_adapter()
        call(self.url, "/v1/unload_lora_adapter", {"lora_name": name})
        call(self.url, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})


class AnothersBase(Fault):
    """adapter: another run replaces the base weights"""

    adapters = True

    def between(self, run: "Run") -> None:
        push(self.url, run.other_weights(), "default")


FAULTS: tuple[type[Fault], ...] = (
    *(StaleWeights, StaleReplica, TornFile, CutFile, WrongVersionEchoed, LostUpdate, StaleCache),
    *(AnotherRun, AnotherRunInDisguise),
    *(StaleAdapter, OldAdapterUnderNewName, AbsentAdapter, UnusedAdapter, MergedInBfloat16),
    *(AnothersAdapter, AnothersBase),
)


def call(url: str, path: str, body: object = None) -> None:
    """Make a request, as any process with the key can."""
    headers = {"Content-Type": "application/json", **authorization(url, None)}
    urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body or {}).encode(), headers)).read()


def push(url: str, file: Path, label: str) -> None:
    """Load full weights into a server, as another process would."""
    call(url, "/pause?mode=keep&clear_cache=false")
    call(url, "/start_weight_update")
    call(url, "/update_weights", {"update_info": {"path": str(file)}})
    call(url, "/finish_weight_update", {"weight_version": label})
    call(url, "/reset_prefix_cache?reset_running_requests=true")
    call(url, "/resume")


def inject(fault: type[Fault], model: Path, folder: Path, url: str) -> tuple[int | None, str]:
    """Run syncs with a fault. Return the number of the sync that raised an error (None if none did), and the error."""
    folder.mkdir()
    base = folder / "base.safetensors"
    base.write_bytes((model / "model.safetensors").read_bytes())
    call(url, "/init_weight_transfer_engine", {"init_info": {}})
    push(url, base, "default")
    broken = fault(url, folder)
    with sabotaged(url, broken.tamper) as proxy:
        run = Run(fault.__name__, model, folder, proxy, fault.adapters)
        try:
            for version in range(BROKEN + 2):
                if version == BROKEN:
                    broken.between(run)
                    broken.broken = True
                if error := run.step(version):
                    return version, error
        finally:
            run.sync.close()
    return None, ""


def honest(adapters: bool, model: Path, folder: Path, url: str) -> int:
    """Return the number of errors in a run without a fault."""
    folder.mkdir()
    call(url, "/init_weight_transfer_engine", {"init_info": {}})
    push(url, model / "model.safetensors", "default")
    run = Run("honest", model, folder, url, adapters)
    errors = [error for version in range(HONEST) if (error := run.step(version))]
    run.sync.close()
    print(*errors, sep="\n", end="\n" if errors else "")
    return len(errors)


def measure(adapters: bool, model: Path, folder: Path, url: str) -> dict[str, int]:
    """Inject the faults of full weights or of adapters, run without one, and print the table."""
    faults = [fault for fault in FAULTS if fault.adapters is adapters]
    caught = 0
    for fault in faults:
        at, error = inject(fault, model, folder / fault.__name__, url)
        caught += at == BROKEN
        proof = error.replace(str(folder), "...").split(": ", 1)[-1][:110]
        print(f"{fault.__doc__ or '':90} {'never' if at is None else f'sync {at}':>9}  {proof}", flush=True)
    alarms = honest(adapters, model, folder / f"honest-{adapters}", url)
    print(f"honest syncs with an error: {alarms} of {HONEST}")
    return {"caught": caught, "faults": len(faults), "false_alarms": alarms}


async def main() -> None:
    """Start the servers, and print what the proofs have caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same: it takes a minute")
    parser.add_argument("--vllm", metavar="PYTHON", help="use vLLM, started with this Python")
    args = parser.parse_args()
    server: dict[str, Any] = {"engine": "embedded", "max_model_len": 160, "max_num_seqs": 64}
    if args.vllm:
        transfer = ["--weight-transfer-config", json.dumps({"backend": "file"})]
        server |= {"engine": "vllm", "options": {"python": args.vllm, "args": transfer}, "max_num_seqs": 16}
        Run.tokens = CONTEXT_TOKENS["vllm"]
    total: Counter[str] = Counter()
    print(f"{'fault':90} {'caught at':>9}  by")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model")
        for adapters in (False, True):
            policy = {"path": str(model), "dtype": "float32", "lora": {"rank": 8} if adapters else None}
            recipe = RolloutRecipe.model_validate({"model": policy, "server": server})
            async with serve(recipe, {}) as (_, url):
                total.update(await asyncio.to_thread(measure, adapters, model, folder, url))
    print(json.dumps(total))


if __name__ == "__main__":
    asyncio.run(main())
