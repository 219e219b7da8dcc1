"""The front of SGLang: its requests in SGLang's own terms, its answers, and what it refuses.

Requests are held against tests/sglang_api.json, which is read from SGLang's wheel; test_sglang_api.py compares the two.
"""

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from agentfactory.base.errors import SettingError
from agentfactory.rollout.inference import http_server
from agentfactory.rollout.inference import server_command_line as serving
from agentfactory.rollout.inference.http_transport import ContextOverflowError, refusal
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.inference.sglang import __main__ as front_main
from agentfactory.rollout.inference.sglang.front import read_load
from agentfactory.rollout.inference.sglang.translation import (
    RESERVED_TOKENS,
    WeightUpdates,
    cut,
    from_sglang,
    to_sglang,
)
from agentfactory.rollout.inference.sglang.upstream import ApiError, Served, Sglang, attach
from agentfactory.rollout.inference.weight_digest import ON_CPU, ON_GPU, UNKNOWN, sglang_hash
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.policy import Policy, load_policy
from agentfactory.trainers.sync.content_proof import Content
from agentfactory.trainers.sync.nccl_sync import NcclSync, packed
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from tests.rollout.test_server_contract import make_model
from tests.server_process import serve, sglang_stand_in
from tests.sglang_api import load_table
from tests.sglang_itself import weights

API = load_table()


class Recorded(Sglang):
    """An SGLang server that answers each request with `answers`, and refuses fields that SGLang does not have."""

    def __init__(self, answers: dict[str, Any] | None = None) -> None:
        super().__init__("http://gpu-1:30000")
        self.calls: list[tuple[str, Any]] = []
        self.answers = answers or {}

    async def request(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        assert method in API["routes"][path]
        if name := API["bodies"].get(path):
            fields = API["fields"][name]
            assert body.keys() <= fields.keys()
            assert {field for field, optional in fields.items() if not optional} <= body.keys()
        self.calls.append((path, body))
        answer = self.answers.get(path, {"success": True, "message": ""})
        return 200, json.dumps(answer)


def turn(**params: Any) -> dict[str, Any]:
    return {"token_ids": [5, 6, 7], "model": "policy", "sampling_params": {"logprobs": 0, **params}}


def answer(finish: dict[str, Any], **meta: Any) -> dict[str, Any]:
    known = {"finish_reason": finish, "weight_versions": [{"version": "v1", "start": 0, "end": 2}]}
    known["output_token_logprobs"] = [[-0.5, 8, None], [-1, 9, None]]
    return {"text": "", "output_ids": [8, 9], "meta_info": {**known, **meta}}


def test_every_parameter_that_is_sent_is_one_of_sglang() -> None:
    everything: dict[str, Any] = {
        **{"temperature": 0.7, "max_tokens": 9, "stop_token_ids": [4], "stop": ["x"], "ignore_eos": True},
        **{"logit_bias": {"3": -100.0}, "logprobs": 2, "logprob_token_ids": [4, 5], "top_p": 1.0, "top_k": -1},
        **{"min_p": 0.0, "min_tokens": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1, "seed": None},
        **{"repetition_penalty": 1.0, "detokenize": True},
    }
    request = to_sglang({**turn(**everything), "cache_salt": "v1", "request_id": "r"}, 100)
    assert request.keys() <= set(API["generate"]) & API["fields"]["GenerateReqInput"].keys()
    assert request["sampling_params"].keys() <= set(API["sampling"])
    assert (request["rid"], request["cache_salt"], request["token_ids_logprob"]) == ("r", "v1", [4, 5])
    assert request["sampling_params"]["max_new_tokens"] == 9
    assert request["sampling_params"]["min_new_tokens"] == 1
    assert to_sglang(turn(), 100)["sampling_params"]["max_new_tokens"] == 97, "the rest of the context"
    salts = {to_sglang(turn(skip_reading_prefix_cache=True), 100)["cache_salt"] for _ in range(2)}
    assert len(salts) == 2, "a request that passes the cache by has a cache of its own"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (turn(seed=3), "sampling_params.seed"),
        (turn(prompt_logprobs=1), "sampling_params.prompt_logprobs"),
        (turn(stop=[""]), "sampling_params.stop"),
        (turn(logprobs=3), "sampling_params.logprobs"),
        ({**turn(), "content_parts": [{}]}, "content_parts: images"),
        ({**turn(), "priority": 1}, "priority"),
        ({**turn(), "token_ids": ["5"]}, "token_ids"),
    ],
)
def test_what_sglang_cannot_do_is_named(body: dict[str, Any], named: str) -> None:
    with pytest.raises(ApiError, match=named) as caught:
        to_sglang(body, 100)
    assert caught.value.status == 400


def test_a_prompt_that_sglang_would_refuse_overflows_the_context() -> None:
    longest = 100 - RESERVED_TOKENS
    to_sglang({**turn(), "token_ids": [5] * longest}, 100)
    with pytest.raises(ApiError) as caught:
        to_sglang({**turn(), "token_ids": [5] * (longest + 1)}, 100)
    assert isinstance(refusal(caught.value.status, str(caught.value)), ContextOverflowError)


@pytest.mark.parametrize(
    ("finish", "params", "expected"),
    [
        ({"type": "length", "length": 2}, {}, ("length", None)),
        ({"type": "stop", "matched": 9}, {}, ("stop", None)),
        ({"type": "stop", "matched": 9}, {"stop_token_ids": [9]}, ("stop", 9)),
        ({"type": "stop", "matched": [8, 9]}, {"stop_token_ids": [9]}, ("stop", 9)),
        ({"type": "stop", "matched": "x"}, {"stop": ["x"]}, ("stop", "x")),
        ({"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}, {}, ("abort", None)),
    ],
)
def test_ends_of_turns(finish: dict[str, Any], params: dict[str, Any], expected: tuple[str, Any]) -> None:
    body = turn(**params)
    [choice] = from_sglang(body, to_sglang(body, 100), answer(finish))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == expected
    assert choice["token_ids"] == [8, 9]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5, -1]
    assert choice["weight_versions"] == [{"version": "v1", "start": 0, "end": 2}]


@pytest.mark.parametrize(
    ("response", "status", "named"),
    [
        (answer({"type": "stop", "matched": "NaN happened"}), 500, "NaN happened"),
        (answer({"type": "abort", "message": "out of memory", "status_code": 503}), 503, "out of memory"),
        (answer({"type": "length"}, output_token_logprobs=[[-0.5, 8, None]]), 502, "log-probabilities of 1"),
        (answer({"type": "length"}, output_token_logprobs=[[-1, 9, None], [-1, 8, None]]), 502, "not the same tokens"),
        (answer({"type": "length"}, weight_versions=None), 502, "0.5.23"),
    ],
)
def test_answers_that_cannot_be_trained_on(response: dict[str, Any], status: int, named: str) -> None:
    with pytest.raises(ApiError, match=named) as caught:
        from_sglang(turn(), to_sglang(turn(), 100), response)
    assert caught.value.status == status


def test_answers_are_read_from_keys_that_sglang_has() -> None:
    read = {"output_token_logprobs", "output_token_ids_logprobs", "finish_reason", "weight_versions"}
    assert read <= set(API["meta"])
    assert {"output_ids", "meta_info"} <= set(API["turn"])
    assert set(API["span"]) == {"version", "start", "end"}


# ---- weights


async def test_an_update_from_files() -> None:
    sglang = Recorded()
    updates = WeightUpdates(sglang, on_gpu=True)
    await updates.join({})
    await updates.start()
    await updates.load({"path": str(Path(__file__).parent)})
    await updates.finish("run-v1")
    assert [path for path, _ in sglang.calls] == ["/update_weights_from_disk", "/update_weight_version"]
    # either would abort the turns that the pause holds
    assert sglang.calls[0][1].get("abort_all_requests", False) is False
    assert sglang.calls[1][1] == {"new_version": "run-v1", "abort_all_requests": False}


async def test_an_update_by_broadcast() -> None:
    sglang = Recorded()
    updates = WeightUpdates(sglang, on_gpu=True)
    info = {"master_address": "10.0.0.1", "master_port": 4, "rank_offset": 1, "world_size": 2}
    for port in (4, 5):
        await updates.join({**info, "master_port": port, "packed_buffer_size_bytes": 100})
    joined = [body for path, body in sglang.calls if path == "/init_weights_update_group"]
    assert [(body["group_name"], body["backend"]) for body in joined] == [(f"agentfactory-{n}", "nccl") for n in (4, 5)]
    assert ("/destroy_weights_update_group", {"group_name": "agentfactory-4"}) in sglang.calls
    sglang.calls.clear()
    await updates.start()
    lists = {"names": ["a", "b", "c"], "dtype_names": ["float32"] * 3, "shapes": [[30], [2, 2], [1]]}
    await updates.load(lists)
    await updates.finish("run-v1")
    paths = ["/begin_weight_update", *["/update_weights_from_distributed"] * 2, "/end_weight_update"]
    assert [path for path, _ in sglang.calls] == [*paths, "/update_weight_version"]
    assert [body["names"] for _, body in sglang.calls[1:3]] == [["a"], ["b", "c"]]
    # an update whose sender died is ended by the next
    await updates.load(lists)
    sglang.calls.clear()
    await updates.start()
    assert [path for path, _ in sglang.calls] == ["/end_weight_update"]


async def test_updates_that_are_refused(tmp_path: Path) -> None:
    updates = WeightUpdates(Recorded(), on_gpu=False)
    for info, named in (
        ({"path": str(tmp_path / "model.safetensors")}, "is not a folder"),
        ({"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}, "joined no process group"),
        ({"ipc_handles_pickled": ""}, "with SGLang, it is"),
    ):
        with pytest.raises(ApiError, match=named):
            await updates.load(info)
    with pytest.raises(ApiError, match="no weights were updated"):
        await updates.finish("run-v1")
    with pytest.raises(ApiError, match="init_info"):
        await updates.join({"packed": True})


def test_both_ends_cut_the_stream_of_weights_alike() -> None:
    sizes = 2 * torch.randint(1, 200, (40,), generator=torch.Generator().manual_seed(0))
    kinds = [torch.float32, torch.bfloat16] * 20
    weights = {str(n): torch.zeros(size, dtype=kind) for n, (size, kind) in enumerate(zip(sizes, kinds, strict=True))}
    dtypes = [str(kind).removeprefix("torch.") for kind in kinds]
    parts = [*weights], dtypes, [list(value.shape) for value in weights.values()]
    for most in (1, 500, 3000, 10**6):
        theirs = [sum(value.nbytes for value in [*weights.values()][part]) for part in cut(*parts, most)]
        assert theirs == [buffer.numel() for buffer in packed(iter(weights.items()), most)]


@pytest.mark.parametrize(
    ("on_gpu", "ranks", "function"), [(False, 1, "sglang_cpu"), (True, 1, "sglang_gpu"), (True, 2, UNKNOWN)]
)
async def test_checksums_name_their_function(on_gpu: bool, ranks: int, function: str) -> None:
    places = [dict.fromkeys(API["place"], 0) | {"tp_rank": rank} for rank in range(ranks)]
    told = [{"checksums": {"w": "00ff"}, "per_gpu_checksum": "", "parallelism_info": [place]} for place in places]
    sglang = Recorded({"/weights_checker": {"success": True, "message": "", "ranks": told}})
    found = await WeightUpdates(sglang, on_gpu).checksums()
    assert list(found) == [f"dp0:pp0:pcp0:tp{rank}:w" for rank in range(ranks)]
    assert set(found.values()) == {f"{function}:00ff"}


# tests/sglang_itself.py with SGLang 0.5.23: on a CPU, and its GPU kernel by Triton's interpreter
HASHES = [
    ("f595c5bd450f89fb", "8e96e524dcf2ec62"),
    ("2e5dd5028c24dc40", "520181488f8f2ce9"),
    ("212da8b5c9339dd6", "e74adc1dda02f88c"),
    ("c80583dd604e3bc5", "358929e652698942"),
    ("4d6a8e90039fc978", "785cfd144e810680"),
    ("84c200f9b7f6cdc9", "21f4e852a15a86af"),
    ("dfae24c290cf15dd", "a822c367fda95dd2"),
]


@pytest.mark.numbers
def test_hashes_are_those_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [tuple(sglang_hash(w, function) for function in (ON_CPU, ON_GPU)) for w in weights()] == HASHES
    monkeypatch.setattr("agentfactory.rollout.inference.weight_digest._TILES_AT_ONCE", 1)
    assert [sglang_hash(w, ON_GPU) for w in weights()] == [on_gpu for _, on_gpu in HASHES]


@pytest.mark.parametrize("function", [ON_CPU, ON_GPU])
def test_content_is_proven_by_sglangs_hashes(function: str) -> None:
    """Projections are stacked, a vocabulary is padded, and a norm is stored in float32."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"q_proj": 8, "k_proj": 4, "v_proj": 4}
    layer = "model.layers.0.self_attn"
    state = {f"{layer}.{name}.weight": torch.randn(rows, 8, generator=draw).bfloat16() for name, rows in shapes.items()}
    stacked = torch.cat(list(state.values()))
    state["model.embed_tokens.weight"] = table = torch.randn(70, 8, generator=draw).bfloat16()
    state["model.norm.weight"] = norm = torch.randn(8, generator=draw).bfloat16()
    served = {
        f"{layer}.qkv_proj.weight": stacked,
        "model.embed_tokens.weight": torch.cat([table, table.new_zeros(58, 8)]),
        "model.norm.weight": norm.float(),
    }
    told = {f"dp0:pp0:pcp0:tp0:{name}": f"{function}:{sglang_hash(value, function)}" for name, value in served.items()}
    Content(state).check(told)
    stacked[3, 3] += 1
    changed = f"{function}:{sglang_hash(stacked, function)}"
    with pytest.raises(SyncError, match=r"qkv_proj\.weight differs"):
        Content(state).check({**told, f"dp0:pp0:pcp0:tp0:{layer}.qkv_proj.weight": changed})


# ---- the server


async def test_a_server_that_cannot_train_is_refused_by_its_setting() -> None:
    settings = {"tp_size": 2, "pp_size": 1, "dp_size": 1, "device": "cuda", "quantization": None}
    settings["disaggregation_mode"] = "null"
    assert settings.keys() == set(API["settings"])
    model = {"is_generation": True, "model_path": "/model", "weight_version": "default"}
    assert model.keys() <= set(API["answers"]["/model_info"])
    scores = [[[-1.0, 0, None], [-2.0, 1, None]]]
    good = {
        "/server_info": settings,
        "/model_info": model,
        "/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]},
        "/generate": {"meta_info": {"output_token_ids_logprobs": scores, "weight_versions": []}},
    }
    # the same scores at each temperature
    with pytest.raises(SettingError, match="before temperature; fix: start SGLang without SGLANG_RETURN_ORIGINAL"):
        await attach(Recorded(good))
    even = [[[-1.0, 0, None], [-1.0, 1, None]]]
    good["/generate"] = {"meta_info": {"output_token_ids_logprobs": even}}
    with pytest.raises(SettingError, match=r"which weights sampled a token .*; fix: start SGLang 0\.5"):
        await attach(Recorded(good))
    good["/generate"] = {"meta_info": {"output_token_ids_logprobs": even, "weight_versions": []}}
    assert await attach(Recorded(good)) == Served("/model", 4096, 2, on_gpu=True)
    for changed, named in (
        ({"dp_size": 2}, "has 2 data-parallel replicas"),
        ({"quantization": "fp8"}, r"quantised \(fp8\)"),
        ({"disaggregation_mode": "decode"}, "is a decode server"),
    ):
        with pytest.raises(SettingError, match=rf"server\.options\.attach: got http://gpu-1:30000, but it.* {named}"):
            await attach(Recorded({**good, "/server_info": {**settings, **changed}}))


def test_the_load_is_read_from_sglangs_metrics() -> None:
    queued, running, used, tokens, usage = API["metrics"]
    gauges = {running: 3.0, queued: 2.0, used: 300.0, usage: 0.5}
    lines = [f"# HELP {running} x", *(f'{name}{{a="b"}} {value}' for name, value in gauges.items())]
    lines += [f'{tokens}{{a="b",mode="{mode}"}} {count}' for mode, count in zip(API["modes"], (10, 4, 7), strict=True)]
    load = read_load("\n".join(lines))
    assert (load.running, load.waiting, load.cache) == (3, 2, 0.5)
    assert (load.blocks, load.block_size) == (600, 1)
    assert (load.prompt_tokens, load.cached_tokens, load.generation_tokens) == (14, 4, 7)


def test_sglang_is_started_with_flags_that_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = []

    class Started(Exception):
        pass

    def start(python: str | None, flags: list[str]) -> None:
        started.append((python, flags))
        raise Started

    options = {"python": "/x/python", "tensor_parallel_size": 2, "gpu_memory_utilization": 0.8, "args": ["--own", "1"]}
    server = {"engine": "sglang", "options": options, "max_model_len": 512}
    recipe = TrainRecipe.model_validate({"model": {"path": "m"}, "server": server, "train": {"steps": 1}})
    command = serving.server_command(recipe)
    monkeypatch.setattr(front_main, "SglangProcess", start)
    monkeypatch.setattr(http_server.signal, "signal", lambda *_: None)
    monkeypatch.setattr(http_server.parent_watch, "follow_parent", lambda: None)
    monkeypatch.setattr(sys, "argv", command[3:])
    with pytest.raises(Started):
        front_main.main()
    [(python, flags)] = started
    assert python == "/x/python"
    known = {flag for names in API["flags"].values() for flag in names}
    assert {flag for flag in flags if flag.startswith("--")} - known == {"--own"}
    assert flags[flags.index("--context-length") + 1] == "512"
    assert flags[flags.index("--tp-size") + 1] == "2"


def test_adapters_are_refused() -> None:
    recipe = TrainRecipe.model_validate({"model": {"path": "m"}, "server": {"engine": "sglang"}, "train": {"steps": 1}})
    with pytest.raises(SettingError, match="serves no adapters here; fix: `agentfactory export` the adapter merged"):
        serving.server_command(recipe, {"a": Path("a")})


# ---- with the stand-in


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), True)


@contextmanager
def fronted(model: Path, folder: Path, **environment: str) -> Iterator[ServerControl]:
    with ExitStack() as stack:
        url = stack.enter_context(sglang_stand_in(model, folder, **environment))
        server = {"engine": "sglang", "max_model_len": 512, "options": {"attach": url}}
        policy = {"path": str(model), "dtype": "float32"}
        yield ServerControl(stack.enter_context(serve({"model": policy, "server": server}, folder)))


def policy_of(model: Path) -> Policy:
    sections = {"model": {"path": str(model), "dtype": "float32"}, "train": {"steps": 1}}
    return load_policy(TrainRecipe.model_validate(sections))


@pytest.mark.extended
@pytest.mark.processes
def test_weights_arrive_by_broadcast_and_are_proven(model: Path, tmp_path: Path) -> None:
    policy = policy_of(model)
    with fronted(model, tmp_path) as server:
        sync = NcclSync([server], buffer_bytes=200_000)
        for version in (0, 1):
            with torch.no_grad():
                next(iter(policy.parameters())).mul_(1.1)
            report = sync.push(version, policy, policy.gather())
            assert server.get("/weight_info") == {"weight_version": report.label}
        sync.close()


@pytest.mark.extended
@pytest.mark.processes
def test_an_update_that_sglang_does_not_apply_is_found(model: Path, tmp_path: Path) -> None:
    policy = policy_of(model)
    with torch.no_grad():
        next(iter(policy.parameters())).mul_(1.1)
    with fronted(model, tmp_path, SGLANG_STAND_IN_FAULT="deaf") as server:
        sync = NcclSync([server])
        with pytest.raises(SyncError, match="differs from the trainer's after the update"):
            sync.push(0, policy, policy.gather())
        assert server.get("/is_paused") == {"is_paused": True}
        sync.close()


@pytest.mark.extended
@pytest.mark.processes
async def test_sglang_is_started_and_ends_with_its_front(model: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$2" = -c ] && echo lacks && exit\nshift 3\nexec {sys.executable} -m tests.sglang_server "$@"\n'
    )
    python.chmod(0o755)
    server = {"engine": "sglang", "max_model_len": 512, "options": {"python": str(python)}}
    with serve({"model": {"path": str(model), "dtype": "float32"}, "server": server}, tmp_path) as url:
        async with InferenceClient(url) as client:
            await client.check_routes()
            completion = await client.generate([5, 6, 7], "policy", {"max_tokens": 4, "temperature": 1.0})
            assert len(completion.token_ids) == 4
        async with aiohttp.ClientSession() as stranger:
            for route, status in (("/v1/models", 401), ("/is_paused", 401), ("/health", 200)):
                async with stranger.get(url + route) as response:
                    assert response.status == status
        log = (tmp_path / "server.log").read_text()
        port = int(log.partition("ready to roll! http://127.0.0.1:")[2].split()[0])
    with socket.socket() as probe, suppress(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))
        pytest.fail("SGLang outlives its front")
