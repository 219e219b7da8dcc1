"""The front of one SGLang server: an aiohttp server with the routes of our protocol."""

import asyncio
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from agentfactory.rollout.inference.http_server import ApiError, Json, ProtocolServer, body_of
from agentfactory.rollout.inference.server_metrics import METRICS_ROUTE, Load, write_load
from agentfactory.rollout.inference.sglang.translation import WeightUpdates, from_sglang, to_sglang
from agentfactory.rollout.inference.sglang.upstream import Served, Sglang

_MODES = {"abort": "abort", "keep": "retract"}
"""Mode of /pause -> mode of SGLang's /pause_generation. `in_place` would also keep requests, but leaves a sampled token
unprocessed, which SGLang would then count among those of the next version."""

NCCL_VARIABLES = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Variables that SGLang sets in its processes (sglang/srt/entrypoints/engine.py)."""


class Front(ProtocolServer):
    def __init__(
        self, sglang: Sglang, served: Served, served_model_name: str, api_key: str, nccl: str | None = None
    ) -> None:
        """`nccl` is the version of NCCL that SGLang has, if it is known."""
        super().__init__("SGLang", api_key, served.max_model_len, images=True)
        self._sglang = sglang
        self._served = served
        self._name = served_model_name
        self._nccl = nccl
        self._updates = WeightUpdates(sglang, served.on_gpu)
        self._aborts: set[asyncio.Task[Any]] = set()

    # ---- generation

    async def generate(self, http: web.BaseRequest) -> Json:
        body = await body_of(http)
        if (name := body.get("model") or self._name) != self._name:
            raise ApiError(404, f"The model `{name}` does not exist.")
        request = to_sglang(body, self._served.max_model_len)
        try:
            answer = await self._sglang.ask("/generate", request)
        except asyncio.CancelledError:  # the client has disconnected
            abort = asyncio.create_task(self._sglang.request("POST", "/abort_request", {"rid": request["rid"]}))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)
            raise
        return from_sglang(body, request, answer)

    async def pause(self, http: web.BaseRequest) -> Json:
        """Block new requests, and end (abort) or hold (keep) running ones. Held requests recompute their caches."""
        mode = http.query.get("mode", "abort")
        if mode not in _MODES:
            raise self.unsupported("mode", mode, " or ".join(_MODES))
        await self._sglang.ask("/pause_generation", {"mode": _MODES[mode]})
        return {"status": "paused"}

    async def resume(self, http: web.BaseRequest) -> Json:
        await self._sglang.ask("/continue_generation", {})
        return {"status": "resumed"}

    async def is_paused(self, http: web.BaseRequest) -> Json:
        # SGLang itself knows, also after a restart of this front
        return {"is_paused": (await self._sglang.request("GET", "/ready"))[0] != 200}

    # ---- weights

    async def init_weight_transfer_engine(self, http: web.BaseRequest) -> Json:
        await self._updates.join((await body_of(http)).get("init_info"))
        return {"message": "Weight transfer initialized"}

    async def get_world_size(self, http: web.BaseRequest) -> Json:
        """Return the number of workers, their host, the kind of process group in which they receive a broadcast, and
        what NCCL requires to be equal on both ends: its version, and these variables."""
        host, kind = urlsplit(self._sglang.url).hostname, self._updates.process_group
        needs = {"nccl": self._nccl, "variables": NCCL_VARIABLES} if kind == "nccl" else {}
        return {"world_size": self._served.workers, "host": host, "process_group": kind, **needs}

    async def start_weight_update(self, http: web.BaseRequest) -> Json:
        await self._updates.start()
        return {"message": "Weight update started"}

    async def update_weights(self, http: web.BaseRequest) -> Json:
        await self._updates.load((await body_of(http)).get("update_info"))
        return {"message": "Weights updated"}

    async def finish_weight_update(self, http: web.BaseRequest) -> Json:
        await self._updates.finish((await body_of(http)).get("weight_version"))
        return {"message": "Weight update finished"}

    async def weight_info(self, http: web.BaseRequest) -> Json:
        return {"weight_version": (await self._sglang.ask("/model_info"))["weight_version"]}

    async def weight_checker(self, http: web.BaseRequest) -> Json:
        action = (await body_of(http)).get("action")
        if action != "checksum":
            raise self.unsupported("action", action, "checksum")
        return {"checksums": await self._updates.checksums()}

    async def reset_prefix_cache(self, http: web.BaseRequest) -> Json:
        """Drop the caches. SGLang refuses while requests run; those that a pause holds have none."""
        return {"success": (await self._sglang.request("POST", "/flush_cache"))[0] == 200}

    # ---- the server

    async def health(self, http: web.BaseRequest) -> Json:
        # SGLang's own /health samples a token, which takes a second, and fails while it is paused
        await self._sglang.ask("/model_info")
        return {}

    async def models(self, http: web.BaseRequest) -> Json:
        # each update from disk renames the model in SGLang's own list
        card = {"id": self._name, "object": "model", "root": self._served.model, "parent": None}
        return {"object": "list", "data": [{**card, "max_model_len": self._served.max_model_len}]}

    async def metrics(self, http: web.BaseRequest) -> str:
        status, page = await self._sglang.request("GET", METRICS_ROUTE)
        if status != 200 or "sglang:num_running_reqs" not in page:
            raise ApiError(404, f"SGLang at {self._sglang.url} has no metrics; start it with --enable-metrics")
        return write_load(read_load(page))


def read_load(page: str) -> Load:
    """Read the load from SGLang's Prometheus page. Its gauges are as old as its last log line, 40 steps at most."""
    gauges: dict[str, float] = {}
    tokens: dict[str, float] = {}
    for line in page.splitlines():
        name, _, rest = line.partition("{")
        if not name.startswith("sglang:"):
            continue
        value = float(rest.rpartition(" ")[2])
        gauges[name] = max(gauges.get(name, 0.0), value)
        if name == "sglang:realtime_tokens_total":
            mode = rest.partition('mode="')[2].partition('"')[0]
            tokens[mode] = tokens.get(mode, 0.0) + value
    cached, usage = tokens.get("prefill_cache", 0.0), gauges.get("sglang:token_usage", 0.0)
    return Load(
        waiting=gauges.get("sglang:num_queue_reqs", 0.0),
        running=gauges["sglang:num_running_reqs"],
        cache=usage,
        prompt_tokens=tokens.get("prefill_compute", 0.0) + cached,
        generation_tokens=tokens.get("decode", 0.0),
        cached_tokens=cached,
        # known once tokens are in use
        blocks=round(gauges.get("sglang:num_used_tokens", 0.0) / usage) if usage else 0.0,
        block_size=1.0,
    )
