"""Our code uses only what tests/vllm_api.json has for each version of vLLM, and the file is what vLLM's wheels say."""

import ast
import inspect
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from packaging.specifiers import SpecifierSet

from agentfactory.placement import server_memory
from agentfactory.placement.plan_choice import VLLM_SHARE
from agentfactory.recipe.train_checks import ADAPTED_TOWER
from agentfactory.rollout.chains import chat_endpoint
from agentfactory.rollout.chains.sampling import Sampler
from agentfactory.rollout.inference import http_server, http_transport, server_metrics
from agentfactory.rollout.inference import server_command_line as serving
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.inference.teacher_client import TeacherClient, TeacherServer
from agentfactory.rollout.inference.vllm import TABLE_ADAPTERS
from agentfactory.trainers.checkpoints.checkpoint_folder import digest
from agentfactory.trainers.sync import adapter_sync, canary, content_proof, full_sync, ipc_sync, nccl_sync, weight_sync
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from tests.conftest import REPOSITORY
from tests.source_names import description, parsed, unpacked_wheel
from tests.vllm_api import Table, load_tables, read_table

TABLES = load_tables()
each_version = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
CODE = [file for name in ("agentfactory", "benchmarks", "tests/vllm") for file in (REPOSITORY / name).rglob("*.py")]
"""Files that may import vLLM."""
VLLM = REPOSITORY / "agentfactory" / "rollout" / "inference" / "vllm"
ENGINE = "vllm.distributed.weight_transfer.base:WeightTransferEngine"
OWN = {"VLLM_PYTHON", "VLLM_SHARE"}
"""Names of ours."""
URL = "http://127.0.0.1:9"
EXPECTED = {
    "LogprobsMode": "Literal['raw_logits', 'raw_logprobs', 'processed_logits', 'processed_logprobs']",
    **{"SchedulerPolicy": "Literal['fcfs', 'priority']", "PauseMode": "Literal['abort', 'wait', 'keep']"},
    "PyNcclCommunicator.broadcast": "(self, tensor, src, stream=...)",
    "PyNcclCommunicator.destroy": "(self)",
    "CPUUnquantizedExperts.process_weights_after_loading": "(self, layer)",
    "Worker.update_weights": "(self, update_info)",
}
"""Choices that we name, and signatures of what we call through objects."""


def uses() -> dict[str, list[ast.Call]]:
    """Everything of vLLM that our code imports or takes from an import, with its calls."""
    found: dict[str, list[ast.Call]] = {}
    for code in map(parsed, CODE):
        known: dict[str, str] = {}
        for node in ast.walk(code):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("vllm."):
                known |= {alias.asname or alias.name: f"{node.module}:{alias.name}." for alias in node.names}
            elif isinstance(node, ast.Import):
                known |= {alias.name: f"{alias.name}:" for alias in node.names if alias.name.startswith("vllm.")}
        for node in ast.walk(code) if known else ():
            if isinstance(node, ast.Name | ast.Attribute | ast.Call):
                text = ast.unparse(node.func if isinstance(node, ast.Call) else node)
                own, _, member = text.rpartition(".")
                name = known.get(text, "").rstrip(".") or (own in known and f"{known[own]}{member}")
                if name and not name.endswith("__"):
                    found.setdefault(name, []).extend([node] if isinstance(node, ast.Call) else [])
    return found


@each_version
def test_all_that_our_code_imports_and_calls_is_there(table: Table) -> None:
    assert {part for part, rows in table.items() if None in rows.values()} <= {"texts"}
    found = uses()
    assert len(found) > 30
    for name, calls in found.items():
        for call in calls if (seen := table["names"][name])[0] == "(" else ():
            function = eval(f"lambda {re.sub('^(cls|self)(, )?', '', seen[1:-1])}: 0")
            inspect.signature(function).bind(*call.args, **{str(word.arg): word.value for word in call.keywords})


@each_version
def test_our_engine_for_files_is_one_of_vllms(table: Table) -> None:
    plugin = parsed(VLLM / "vllm_plugin.py")
    [engine] = [e for e in plugin.body if isinstance(e, ast.ClassDef) and e.name == "FileWeightTransferEngine"]
    methods = {node.name: description(node) for node in engine.body if isinstance(node, ast.FunctionDef)}
    assert {*table["names"][ENGINE].split()[1:]} <= methods.keys()
    own = {*re.findall(r"\bself\.(\w+)|^    (\w+) = ", ast.unparse(engine), re.M)}
    seen = {name: table["names"][f"{ENGINE}.{name}"] for name in {*methods, *(a or b for a, b in own)}}
    assert {name: seen[name] for name in methods} == methods
    [own_digests] = [e for e in plugin.body if isinstance(e, ast.FunctionDef) and e.name == "used_weights_digests"]
    assert table["names"]["vllm.v1.worker.gpu_worker:compute_tensor_digests"] == description(own_digests)


@each_version
def test_flags_variables_metrics_and_values(table: Table) -> None:
    vllm_server = (VLLM / "vllm_server.py").read_text(encoding="utf-8")
    parts = (serving.vllm_arguments, serving._image_flags, serving.server_command, TeacherClient._remedy)
    sources = map(inspect.getsource, (*parts, http_transport, chat_endpoint, server_memory))
    text = " ".join((vllm_server, *sources, ADAPTED_TOWER, server_metrics.LOAD_FIX))
    flags = {flag.replace("--no-", "--") for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)}
    others = {"--api-key-env", TABLE_ADAPTERS, "--adapter", "--jinja", "--url", "--model", "--enable-metrics"}
    assert flags - others == table["flags"].keys()
    whole = "".join(file.read_text(encoding="utf-8") for file in CODE)
    assert {*re.findall(r"\b(VLLM_[A-Z_]+)\b(?! *[=*+])", whole)} - OWN == table["variables"].keys()
    metrics = {*server_metrics._FIELDS.values(), server_metrics._CACHE}
    assert table["metrics"] == {name: "counter" if name.endswith("_total") else "gauge" for name in metrics}
    names = {name.rpartition(":")[2]: found for name, found in table["names"].items()}
    assert names["MaxLoRARanks"] == f"Literal{[*serving.LORA_RANKS]}"
    assert f"default={VLLM_SHARE}," in names["CacheConfig.gpu_memory_utilization"]
    assert {name: names[name] for name in EXPECTED} == EXPECTED
    setup = (REPOSITORY / "setup.py").read_text(encoding="utf-8")
    assert f"{names['DEFAULT_PLUGINS_GROUP']}: ".replace("'", '"') in setup
    [bound] = re.findall(r'"vllm": \["vllm(.*)"\]', setup)
    versions = " or ".join(version.removesuffix(".0") for version in TABLES)
    assert f"vLLM {versions} (`{bound}`)" in (REPOSITORY / "docs" / "servers.md").read_text(encoding="utf-8")
    assert [*SpecifierSet(bound).filter(f"0.{minor}" for minor in range(99))] == versions.split(" or ")


@each_version
def test_texts_that_we_look_for(table: Table) -> None:
    """vLLM says them, in each version; others are of libraries, of the system, and our own."""
    asked = {re.escape(mark) for _, mark in serving._STAGES if mark} | {pattern for pattern, _ in serving._FAILURES}
    assert asked | {re.escape(server_metrics.REPLICA_HEADER)} <= table["texts"].keys()
    others = r"Repo id|already in use|Application|agentfactory|torchvision|bitsandbytes|cannot be imported"
    assert [text for text, found in table["texts"].items() if not (found or re.search(others, text))] == []


class Recorded(ServerControl):
    """A server that holds each request against the table, and answers with what vLLM has."""

    def __init__(self, table: Table) -> None:
        super().__init__(URL)
        self.table, self.sleeps, self.cards = table, False, {"policy": {"id": "policy"}}
        self.transfer = ""
        """vLLM's engine that gets `init_info` and `update_info`."""

    def fields(self, name: str) -> dict[str, bool]:
        return next(found for place, found in self.table["fields"].items() if place.endswith(f":{name}"))

    def kept(self, kind: str, **values: Any) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name in self.fields(kind)}

    def check(self, kind: str, sent: Any) -> None:
        known = self.fields(kind)
        assert {name for name, optional in known.items() if not optional} <= {*sent} <= known.keys()

    def _request(self, method: str, path: str, body: Any, replica: int | None = None) -> str:
        if path == "/openapi.json":  # FastAPI's own
            return json.dumps({"paths": self.table["routes"]})
        path, _, query = path.partition("?")
        route, body = self.table["routes"][path], body or {}
        assert (method, path) == (route["method"], path)
        kinds = [name for name in route["takes"] if name.endswith("Request")]
        assert {*body, *re.findall(r"(\w+)=", query)} <= {*(self.fields(kinds[0]) if kinds else route["takes"])}
        for kind in kinds:
            self.check(kind, body)
        infos = {f"{key}_info": f"{self.transfer}WeightTransfer{key.title()}Info" for key in ("init", "update")}
        for key, kind in {**(infos if self.transfer else {}), "sampling_params": "SamplingParams"}.items():
            self.check(kind, body[key]) if key in body else None
        self.sleeps = (self.sleeps or path == "/sleep") and "kv_cache" not in query
        if path == "/v1/unload_lora_adapter":
            del self.cards[body["lora_name"]]
        elif path == "/v1/load_lora_adapter":
            own = self.kept("ModelCard", id=body["lora_name"], root=body["lora_path"], parent="policy")
            self.cards[body["lora_name"]] = own
        told = {"weight_version": "v1", "is_paused": True, "is_sleeping": self.sleeps, "success": True, "world_size": 1}
        answer = {key: value for key, value in {**told, "checksums": {"a": "b"}}.items() if key in route["answers"]}
        answer |= self.kept("ModelList", data=[*self.cards.values()]) if path == "/v1/models" else {}
        return json.dumps(self.completion() if path.endswith("/generate") else answer)

    def completion(self) -> dict[str, Any]:
        """vLLM's answer to the prompt 1, 2: 7, with the candidates 3 and 4."""
        top = [self.kept("GenerateLogProbsContent", token_id=token, logprob=-float(token)) for token in (3, 4)]
        entry = self.kept("GenerateLogProbsContent", token_id=7, logprob=-1.5, top_logprobs=top)
        spans = [self.kept("WeightVersionSpan", version="v1", start=0, end=1)]
        own = {"logprobs": self.kept("GenerateLogProbs", content=[entry]), "weight_versions": spans, "token_ids": [7]}
        choice = self.kept("GenerateTokensChoice", finish_reason="stop", stop_reason="x", **own)
        scores = [None, {"2": self.kept("Logprob", logprob=-0.5, rank=1)}]
        return self.kept("GenerateTokensResponse", choices=[choice], prompt_token_ids=[1, 2], prompt_logprobs=scores)


@each_version
def test_requests_and_answers_of_the_trainer(table: Table, tmp_path: Path) -> None:
    server: Any = Recorded(table)
    content: Any = SimpleNamespace(state={"model.visual.a": 0}, prove=lambda *_: "digest")
    assert full_sync.update_full_weights([server], "v1", content, lambda: None) == "digest"
    assert not full_sync.holds_full_weights(server, "v1", content)
    server.post("/collective_rpc", {"method": "break_replica", "args": []})  # tests/vllm/vllm_replicas.py
    server.check("WeightTransferConfig", {"backend"})  # server_command_line.py
    assert {"id", "root", "parent", "max_model_len", "owned_by"} <= server.fields("ModelCard").keys()
    assert content_proof.served_checksums(server) == {"a": "b"}
    server.sleep()
    for part in ("weights", "kv_cache"):
        server.wake_up(part)
    weights, buffer = [("a", torch.zeros(2))], SimpleNamespace(handles={})
    server.transfer = "IPC"
    with pytest.raises(SyncError, match="can read the memory of GPUs"):
        ipc_sync.IpcSync([server], device=torch.device("cpu"))
    server.post("/update_weights", {"update_info": ipc_sync.update_info(weights, buffer)})  # type: ignore[arg-type]
    server.transfer = "NCCL"
    nccl_sync.NcclSync([server], open_group=lambda *_: None)  # type: ignore[arg-type, return-value]
    server.post("/update_weights", {"update_info": full_sync.described(weights)})
    (tmp_path / adapter_sync.WEIGHTS).write_bytes(b"weights")
    adapter = tmp_path.rename(f"{tmp_path}-{digest(tmp_path / adapter_sync.WEIGHTS)[:16]}")
    sync = adapter_sync.LoraSync([server], adapter.parent, "run-v", keep=2)
    sync._loaded["run-v1"] = adapter
    sync._complete(server)
    sync.close()
    assert [*server.cards] == ["policy"]
    row = canary.CanaryRow([1, 2], [3, 4], (9,), (SimpleNamespace(digest="i"),), (1,))  # type: ignore[arg-type]
    report = weight_sync.SyncReport(1, "v1", "policy", 1, 1.0, "digest")
    assert canary.server_scores(server, [row], report, fresh=True).tolist() == [-3.0, -4.0]


@each_version
async def test_requests_and_answers_of_the_workers(table: Table) -> None:
    server = Recorded(table)

    async def ask(method: str, url: str, body: bytes, **_: Any) -> tuple[int, str, dict[str, str]]:
        return 200, server._request(method, url.removeprefix(URL), json.loads(body)), {}

    async def parts(_: object) -> list[Any]:
        return []

    found = re.findall(r'^ {12}"(\w+)": |parameters\["(\w+)"\]', inspect.getsource(Sampler.sample), re.M)
    sampling = {plain or later: 1 for plain, later in found}
    assert {"temperature", "max_tokens", "stop", "logit_bias"} <= sampling.keys()
    images = SimpleNamespace(collapsed=lambda: [1], parts=parts, spans=[], fault=lambda ids: ids != [1, 2] and "other")
    client, teacher = InferenceClient(URL), TeacherClient(TeacherServer(URL), "policy", 9, 1.0)
    for each in (client, teacher._client):
        each.connection.request = ask  # type: ignore[method-assign, assignment]
    turn = await client.generate([1, 2], "policy", sampling, "v1", images=images, priority=1)
    assert (turn.token_ids, turn.logprobs, turn.stop, turn.versions[0].version) == ([7], [-1.5], "x", "v1")
    assert (await teacher._ask([1, 2], np.array([1]), "chain")).own.tolist() == [-0.5]
    # our own servers have vLLM's routes
    own = {path: method for path, method in http_server._METHODS.items() if path != "/openapi.json"}
    assert own.items() <= {path: route["method"] for path, route in table["routes"].items()}.items()


@pytest.mark.long
@pytest.mark.parametrize("version", TABLES)
def test_the_table_is_the_wheels(tmp_path: Path, version: str) -> None:
    """Downloads 340 MB, or reads the unpacked wheel in the folder AGENTFACTORY_VLLM_SOURCES/VERSION."""
    wheel = Path(os.environ.get("AGENTFACTORY_VLLM_SOURCES", tmp_path)) / version
    if not wheel.is_dir():
        wheel = unpacked_wheel(f"vllm=={version}", tmp_path)
    assert read_table(wheel) == (version, TABLES[version])
