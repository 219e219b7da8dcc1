"""A stand-in for `python -m sglang.launch_server`: SGLang's routes over the embedded engine, for tests without a GPU.

It refuses what sglang_api.json, read from SGLang's wheel, does not list: flags, routes, fields of requests, sampling
parameters; and it answers with listed keys only. What SGLang does silently and a client must know is built in: it
renames the model at an update from disk, ends turns after 128 tokens unless told otherwise, keeps seven tokens of the
context free, and stacks projections.

FAULT in SGLANG_STAND_IN_FAULT: `raw` ignores the temperature in log-probabilities, `deaf` answers updates without
loading them, `nan` ends turns as SGLang does at NaN logits, `mute` reports no versions."""

import argparse
import asyncio
import hashlib
import json
import os
import signal
import sys
import uuid
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentfactory.base.processes import parent_watch
from agentfactory.rollout.inference.embedded.__main__ import _decoder
from agentfactory.rollout.inference.embedded.embedded_server import Server
from agentfactory.rollout.inference.embedded.engine import Engine
from agentfactory.rollout.inference.embedded.generate_route import make_request
from agentfactory.rollout.inference.embedded.packed_linear import ServedWeights
from agentfactory.rollout.inference.embedded.sampling import Request
from agentfactory.rollout.inference.http_server import ApiError
from tests.sglang_api import load_table

Json = dict[str, Any]

API = load_table()
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_WAIT = timedelta(seconds=60)


class StandIn:
    """One server, with the embedded server's loop and pauses."""

    def __init__(self, engine: Engine, settings: argparse.Namespace, eos: frozenset[int], api_key: str | None) -> None:
        self.engine, self.eos = engine, eos
        self.embedded = Server(engine, served_model_name="", api_key="")
        self.weights = ServedWeights(engine.model)
        self.model_path = self.served_model_name = settings.model_path
        self.served_model_name = settings.served_model_name or settings.model_path
        self.context = settings.context_length
        self.decode = _decoder(settings.model_path)
        self.key = api_key
        self.has_metrics = settings.enable_metrics
        self.fault = os.environ.get("SGLANG_STAND_IN_FAULT", "")
        self.session = False
        self.groups: dict[str, Any] = {}
        self.by_rid: dict[str, Request] = {}

    async def dispatch(self, http: web.BaseRequest) -> web.StreamResponse:
        """Answer a request as SGLang does; 500 for one that SGLang would silently misunderstand."""
        methods = API["routes"].get(http.path, ["GET"] if http.path == "/metrics" else [])
        if http.method not in methods:
            return _json({"detail": "Not Found"}, 404)
        open_route = http.path in ("/health", "/metrics")  # as SGLang's middleware
        if self.key and not open_route and http.headers.get("Authorization") != f"Bearer {self.key}":
            return _json({"error": "Unauthorized"}, 401)
        raw = await http.read()
        body = json.loads(raw) if raw else {}
        try:
            if (name := API["bodies"].get(http.path)) is not None:
                fields: dict[str, bool] = API["fields"][name]
                if missing := [field for field, optional in fields.items() if not optional and field not in body]:
                    raise ApiError(400, f"{name} lacks {missing[0]}")
                if unknown := body.keys() - fields.keys():
                    raise ApiError(500, f"{name} has no field {min(unknown)}")
            # each method has the name of its path's last part
            return await getattr(self, http.path.rpartition("/")[2])(http, body)
        except ApiError as error:
            return _json({"error": {"message": str(error)}}, error.status)

    # ---- generation

    async def generate(self, http: web.BaseRequest, body: Json) -> web.Response:
        if unknown := body.keys() - set(API["generate"]):
            raise ApiError(500, f"/generate would ignore {min(unknown)}")
        asked = body["sampling_params"]
        if unknown := asked.keys() - set(API["sampling"]):
            raise ApiError(400, f"unknown field `{min(unknown)}`")
        body = {"rid": uuid.uuid4().hex, **body}
        ids, most = body["input_ids"], asked.get("max_new_tokens", 128)
        # `_validate_one_request` and `validate_input_length`
        if len(ids) >= self.context or len(ids) + most > self.context:
            text = f"Requested token count exceeds the model's maximum context length of {self.context} tokens."
            raise ApiError(400, text)
        if len(ids) >= self.context - 6:
            raise ApiError(400, f"Input length ({len(ids)} tokens) exceeds the maximum allowed length")
        most = min(most, self.context - 2 - len(ids))
        while not self.embedded._open.is_set():
            await self.embedded._open.wait()
        same = ("temperature", "stop_token_ids", "stop", "ignore_eos", "logit_bias")
        params: Json = {key: asked[key] for key in same if key in asked}
        params |= {"max_tokens": most, "logprobs": 0}
        if candidates := body.get("token_ids_logprob"):
            params |= {"logprobs": len(candidates), "logprob_token_ids": candidates}
        told = {"token_ids": ids, "sampling_params": params}
        told |= {"cache_salt": body["cache_salt"]} if body.get("cache_salt") else {}
        finished, of_model = asyncio.Event(), (None, self.engine, self.eos)
        request = make_request(told, *of_model, lambda _: finished.set(), (), self.decode)
        self.engine.add(request)
        self.by_rid[body["rid"]] = request
        self.embedded._work.set()
        await finished.wait()
        del self.by_rid[body["rid"]]
        return _json(self._turn(body, request))

    def _turn(self, body: Json, request: Request) -> Json:
        tokens = request.tokens
        if self.fault == "raw":
            # of a distribution that is not the one sampled from
            request.logprobs = [-1.0 - token % 7 for token in tokens]
            request.candidate_logprobs = [[-1.0 - token % 7 for token in request.candidates] for _ in tokens]
        ends = [start for _, start in request.versions[1:]] + [len(tokens)]
        finish: Json = {"type": "length", "length": request.max_tokens}
        if request.finish_reason == "abort":
            finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        elif request.finish_reason == "stop":
            finish = {"type": "stop", "matched": request.stop_string or tokens[-1]}
        if self.fault == "nan":
            finish = {"type": "stop", "matched": "NaN happened"}
        meta: Json = {
            **{"id": body["rid"], "finish_reason": finish, "cached_tokens": 0, "num_retractions": 0},
            **{"prompt_tokens": len(request.prompt), "completion_tokens": len(tokens)},
            "weight_version": self.engine.weight_version,
            "weight_versions": [
                {"version": version, "start": start, "end": end}
                for (version, start), end in zip(request.versions, ends, strict=False)
            ],
        }
        if self.fault == "mute":
            del meta["weight_versions"]
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[v, t, None] for v, t in zip(request.logprobs, tokens, strict=True)]
        if request.candidates:
            meta["output_token_ids_logprobs"] = [
                [[value, token, None] for value, token in zip(values, request.candidates, strict=True)]
                for values in request.candidate_logprobs
            ]
        assert meta.keys() <= set(API["meta"]), meta.keys() - set(API["meta"])
        assert any(finish.keys() == set(keys) for keys in API["finish"].values()), finish
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    async def abort_request(self, http: web.BaseRequest, body: Json) -> web.Response:
        for rid, request in list(self.by_rid.items()):
            if body.get("abort_all") or rid == body.get("rid"):
                self.engine.abort(request)
        return web.Response()

    async def pause_generation(self, http: web.BaseRequest, body: Json) -> web.Response:
        modes = {"abort": "abort", "retract": "keep"}
        if (mode := body.get("mode", "abort")) not in modes:
            raise ApiError(422, f"the stand-in has no mode {mode!r}")
        await self.embedded._pause(modes[mode])
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, http: web.BaseRequest, body: Json) -> web.Response:
        await self.embedded.resume(http)
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def ready(self, http: web.BaseRequest, body: Json) -> web.Response:
        return web.Response(status=200 if self.embedded._open.is_set() else 503)

    health = ready

    # ---- weights

    async def update_weights_from_disk(self, http: web.BaseRequest, body: Json) -> web.Response:
        self._need_pause()
        folder = Path(body["model_path"])
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            return _failed("Failed to get weights iterator")
        self._load({name: value for file in files for name, value in load_file(file).items()})
        self.served_model_name = self.model_path = str(folder)
        return self._updated(body, num_paused_requests=0)

    async def init_weights_update_group(self, http: web.BaseRequest, body: Json) -> web.Response:
        """As sglang/srt/utils/common.py `init_custom_process_group`, for one worker."""
        from torch.distributed import distributed_c10d as c10d

        def join() -> Any:
            store = dist.TCPStore(body["master_address"], body["master_port"], body["world_size"], False, _WAIT)
            helper: Any = c10d._new_process_group_helper
            kind, prefixed = c10d.Backend(body["backend"]), c10d.PrefixStore(body["group_name"], store)
            named = {"group_name": body["group_name"], "timeout": _WAIT}
            group, _ = helper(body["world_size"], body["rank_offset"], [], kind, prefixed, **named)
            c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(body["world_size"])}
            return group

        self.groups[body["group_name"]] = await asyncio.to_thread(join)
        return _done()

    async def destroy_weights_update_group(self, http: web.BaseRequest, body: Json) -> web.Response:
        if (group := self.groups.pop(body["group_name"], None)) is None:
            return _failed("The group to be destroyed does not exist.")
        dist.destroy_process_group(group)
        return _done()

    async def begin_weight_update(self, http: web.BaseRequest, body: Json) -> web.Response:
        if self.session:
            return _failed("a weight-update session is already open")
        self.session = True
        return _done()

    async def end_weight_update(self, http: web.BaseRequest, body: Json) -> web.Response:
        if not self.session:
            return _failed("no weight-update session is open")
        self.session = False
        return _done()

    async def update_weights_from_distributed(self, http: web.BaseRequest, body: Json) -> web.Response:
        self._need_pause()
        if not self.session:
            return _failed("must run between begin_weight_update() and end_weight_update()")
        if body["load_format"] != "flattened_bucket":
            raise ApiError(400, "the stand-in has no other load_format")
        group = self.groups[body["group_name"]]
        dtypes = [getattr(torch, name) for name in body["dtypes"]]
        sizes = [torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(body["shapes"], dtypes, strict=True)]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        await asyncio.to_thread(partial(dist.broadcast, buffer, src=0, group=group))
        parts = zip(body["names"], dtypes, body["shapes"], buffer.split(sizes), strict=True)
        # `FlattenedTensorBucket.reconstruct_tensors` views the bytes in place, so they must be aligned
        self._load({name: part.view(dtype).reshape(shape) for name, dtype, shape, part in parts})
        return self._updated(body)

    async def update_weight_version(self, http: web.BaseRequest, body: Json) -> web.Response:
        if body.get("abort_all_requests", True):
            for request in self.engine.requests():
                self.engine.abort(request)
        self.engine.weight_version = body["new_version"]
        return _done(new_version=body["new_version"])

    async def weights_checker(self, http: web.BaseRequest, body: Json) -> web.Response:
        """Checksums of the parameters as SGLang's networks have them: projections stacked, a tied head left out."""
        names = [tied[0] for tied in self.weights.tied]
        checksums = {}
        for name in names:
            path, _, last = name.rpartition(".")
            parent, _, own = path.rpartition(".")
            stack, parts = next(((s, p) for s, p in STACKED.items() if own in p), (own, (own,)))
            if own != parts[0]:
                continue
            rows = [self.weights.read(".".join(filter(None, (parent, part, last)))) for part in parts]
            # tensor_hash on a CPU
            data = torch.cat(rows).contiguous().view(-1).view(torch.uint8).numpy()
            number = int.from_bytes(hashlib.sha256(data.data).digest()[:8], "big")
            checksums[".".join(filter(None, (parent, stack, last)))] = f"{number:016x}"
        place = dict.fromkeys(API["place"], 0) | {"role": "target", "tp_size": 1, "dp_size": 1, "pp_size": 1, "size": 1}
        rank = {"checksums": checksums, "per_gpu_checksum": "", "parallelism_info": [place]}
        assert rank.keys() == set(API["checksum"])
        return _done(ranks=[rank], per_engine_checksum="")

    async def flush_cache(self, http: web.BaseRequest, body: Json) -> web.Response:
        # is_fully_idle(ignore_waiting=self._engine_paused)
        if self.engine.busy and not self.embedded._frozen:
            return web.Response(text="Flush cache failed.\n", status=400)
        self.engine.reset_prefix_cache(True)
        return web.Response(text="Cache flushed.\n")

    def _need_pause(self) -> None:
        if self.engine.busy and not self.embedded._frozen:
            raise ApiError(400, "SGLang would wait for all requests; the stand-in refuses")

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        if self.fault != "deaf":
            for name, value in weights.items():
                self.weights.write(name, value)

    def _updated(self, body: Json, **more: Any) -> web.Response:
        if body.get("weight_version") is not None:
            self.engine.weight_version = body["weight_version"]
        if body.get("flush_cache", True):
            self.engine.reset_prefix_cache(True)
        return _done(**more)

    # ---- the server

    async def model_info(self, http: web.BaseRequest, body: Json) -> web.Response:
        keys = dict.fromkeys(API["answers"]["/model_info"])
        own = {"model_path": self.model_path, "served_model_name": self.served_model_name, "is_generation": True}
        return _json({**keys, **own, "weight_version": self.engine.weight_version})

    async def server_info(self, http: web.BaseRequest, body: Json) -> web.Response:
        own: Json = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "device": "cpu", "quantization": None}
        own["disaggregation_mode"] = "null"
        assert own.keys() == set(API["settings"])
        return _json({**own, "version": API["version"]})

    async def models(self, http: web.BaseRequest, body: Json) -> web.Response:
        card = {"id": self.served_model_name, "object": "model", "root": self.served_model_name, "parent": None}
        return _json({"object": "list", "data": [{**card, "max_model_len": self.context}]})

    async def metrics(self, http: web.BaseRequest, body: Json) -> web.Response:
        if not self.has_metrics:
            return web.Response(status=404)
        engine = self.engine
        counts = (engine.computed_tokens, engine.cached_tokens, engine.generation_tokens)
        in_use = engine.cache_usage * engine.max_num_seqs * engine.max_model_len
        gauges = (len(engine.waiting), len(engine.running), in_use, engine.cache_usage)
        queued, running, used, tokens, usage = API["metrics"]
        names = (queued, running, used, usage)
        labels = 'engine_type="unified",model_name="policy",tp_rank="0"'
        lines = [f"{name}{{{labels}}} {value}" for name, value in zip(names, gauges, strict=True)]
        for mode, count in zip(API["modes"], counts, strict=True):
            lines += [f'{tokens}{{{labels},mode="{mode}"}} {count}'] if count else []
        return web.Response(text="".join(f"{line}\n" for line in lines))


def _json(body: Json, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(body).encode(), status=status, content_type="application/json")


def _done(**more: Any) -> web.Response:
    return _json({"success": True, "message": "Success", **more})


def _failed(message: str) -> web.Response:
    return _json({"success": False, "message": message}, 400)


def _settings() -> argparse.Namespace:
    """Parse SGLang's flags, those in the wheel's table only."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    numbers = {"port", "context_length", "max_running_requests", "tp_size"}
    for name, flags in API["flags"].items():
        if name == "enable_metrics":
            parser.add_argument(*flags, dest=name, action="store_true")
        else:
            parser.add_argument(*flags, dest=name, type=int if name in numbers else str)
    # server_args_config_parser.py
    parser.add_argument("--config")
    parser.set_defaults(host="127.0.0.1", port=0, context_length=2048, max_running_requests=12, dtype="float32")
    return parser.parse_args()


async def _serve(settings: argparse.Namespace) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(settings.model_path, dtype=getattr(torch, settings.dtype))
    eos = model.generation_config.eos_token_id
    config = json.loads(Path(settings.config).read_text(encoding="utf-8")) if settings.config else {}
    engine = Engine(model, max_model_len=settings.context_length, max_num_seqs=settings.max_running_requests)
    ends = frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
    server = StandIn(engine, settings, ends, settings.api_key or config.get("api-key"))
    serving = await asyncio.get_running_loop().create_server(
        web.Server(server.dispatch, access_log=None, handler_cancellation=False), settings.host, settings.port
    )
    host, port = serving.sockets[0].getsockname()[:2]
    print(f"The server is fired up and ready to roll! http://{host}:{port}", flush=True)
    await server.embedded.run_engine()


def main() -> None:
    """Serve until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    parent_watch.follow_parent()
    asyncio.run(_serve(_settings()))


if __name__ == "__main__":
    sys.exit(main())
