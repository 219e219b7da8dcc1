"""An aiohttp server with vLLM's routes for the embedded engine, whose steps run in the event loop's thread."""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from agentfactory.rollout.inference.embedded.adapters import Adapter, AdapterError
from agentfactory.rollout.inference.embedded.device_memory import CPU, memory_key
from agentfactory.rollout.inference.embedded.engine import Engine
from agentfactory.rollout.inference.embedded.generate_route import ApiError, Json, answer, make_request
from agentfactory.rollout.inference.embedded.sampling import Request
from agentfactory.rollout.inference.embedded.weight_updates import WeightsError, WeightUpdate, checksums
from agentfactory.rollout.inference.server_metrics import METRICS_ROUTE, Load, write_load
from agentfactory.rollout.text.stop_strings import Decode

if TYPE_CHECKING:
    from agentfactory.rollout.inference.embedded.request_images import HeldImage

Handler = Callable[["Server", web.BaseRequest], Awaitable[Json | str]]

# Event loop iterations after each step, in which sockets are read, requests parsed and responses written.
LOOP_TURNS = 4


class Server:
    """One server: the engine, its adapters, and the state of pause, sleep and weight updates."""

    def __init__(
        self,
        engine: Engine,
        *,
        served_model_name: str,
        eos_token_ids: frozenset[int] = frozenset(),
        api_key: str,
        decode: Decode | None = None,
    ) -> None:
        """`decode` converts ids to text, for stop strings."""
        self.engine = engine
        self.served_model_name = served_model_name
        self.eos_token_ids = eos_token_ids
        self.adapters: dict[str, Adapter] = {}
        self._decode = decode
        self._authorization = f"Bearer {api_key}".encode()
        self._device = engine.device
        self._asleep: set[str] = set()  # subset of "weights", "kv_cache"
        self._frozen = False  # paused with requests kept: no steps
        self._update: WeightUpdate | None = None  # from start_weight_update to finish_weight_update: no steps
        self._open = asyncio.Event()  # set unless paused: admits new requests
        self._open.set()
        self._work = asyncio.Event()
        self._in_flight: set[asyncio.Future[None]] = set()

    # ---- the loop

    async def run_engine(self) -> None:
        """Run steps while there is work; never returns."""
        while True:
            if self._frozen or self._update or self._asleep or not self.engine.busy:
                self._work.clear()
                await self._work.wait()
                continue
            self.engine.step()
            for _ in range(LOOP_TURNS):
                await asyncio.sleep(0)

    async def dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one HTTP request with JSON (/metrics: text)."""
        try:
            if request.path != "/health":
                given = request.headers.get("Authorization", "").encode(errors="replace")
                if not hmac.compare_digest(given, self._authorization):
                    refusal = _answer({"error": "Unauthorized"}, 401)
                    refusal.force_close()  # clients without the key keep no connection
                    return refusal
            methods = ROUTES.get(request.path)
            if methods is None:
                raise ApiError(404, f"there is no route {request.path}")
            method, handler = methods
            if request.method != method:
                raise ApiError(405, f"{request.path} accepts {method}, not {request.method}")
            return _answer(await handler(self, request))
        except ApiError as error:
            kind = {400: "BadRequestError", 404: "NotFoundError"}.get(error.status, "ServerError")
            body = {"message": str(error), "type": kind, "param": None, "code": error.status}
            return _answer({"error": body}, error.status)

    # ---- generation

    async def generate(self, http: web.BaseRequest) -> Json:
        body = await _body(http)
        held = await self._images(body)
        while not self._open.is_set():
            await self._open.wait()
        if self._asleep:
            raise ApiError(503, "the server is asleep; POST /wake_up first")
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = make_request(
            *(body, self._adapter(body), self.engine, self.eos_token_ids),
            *(partial(_finish, finished), held, self._decode),
        )
        self.engine.add(request)
        self._in_flight.add(finished)
        self._work.set()
        try:
            await finished
        except asyncio.CancelledError:  # the client has disconnected
            self.engine.abort(request)
            raise
        finally:
            self._in_flight.discard(finished)
        if request.finish_reason == "error":
            raise ApiError(500, "the model's logits contain NaN: its weights or the adapter have diverged")
        return answer(body, request, self.eos_token_ids)

    async def _images(self, body: Json) -> list["HeldImage"]:
        """Return the images of a generate request."""
        parts = body.get("content_parts")
        if parts and self.engine.encoder is None:
            raise ApiError(400, f"content_parts: the model `{self.served_model_name}` reads only text")
        try:
            return await self.engine.encoder.images.receive(parts) if self.engine.encoder and parts else []
        except ValueError as error:
            raise ApiError(400, f"content_parts: {error}") from error

    def _adapter(self, body: Json) -> Adapter | None:
        """Return the adapter that a generate request names; None for the base model."""
        name = body.get("model") or self.served_model_name
        if name == self.served_model_name:
            return None
        if name not in self.adapters:
            raise ApiError(404, f"The model `{name}` does not exist.")
        return self.adapters[name]

    # ---- pausing

    async def pause(self, http: web.BaseRequest) -> Json:
        """Block new requests, and end (abort), complete (wait) or freeze (keep) running ones."""
        await self._pause(http.query.get("mode", "abort"))
        return {"status": "paused"}

    async def _pause(self, mode: str) -> None:
        if mode not in ("abort", "wait", "keep"):
            raise ApiError(400, f"mode: {mode!r} is not one of abort, wait, keep")
        if mode == "wait" and self._in_flight and self._asleep:
            raise ApiError(409, "kept requests complete only when the server is fully awake; POST /wake_up first")
        self._open.clear()
        if mode == "abort":
            for request in self.engine.requests():
                self.engine.abort(request)
        elif mode == "keep":
            self._frozen = True
        else:
            self._frozen = False
            self._work.set()
            if self._in_flight:
                await asyncio.wait(self._in_flight)

    async def resume(self, http: web.BaseRequest) -> Json:
        if self._update is not None:
            raise ApiError(409, "a weight update is under way; POST /finish_weight_update first")
        self._frozen = False
        self._open.set()
        self._work.set()
        return {"status": "resumed"}

    async def is_paused(self, http: web.BaseRequest) -> Json:
        return {"is_paused": not self._open.is_set() or self._update is not None}

    # ---- weights

    async def init_weight_transfer_engine(self, http: web.BaseRequest) -> Json:
        """Initialise nothing; return the devices with shareable memory, as keys of the ipc backend's handles."""
        if (await _body(http)).get("init_info") not in (None, {}, {"packed": True}):
            raise ApiError(400, 'init_info: the file backend takes {}, the ipc backend {"packed": true}')
        memory = dict.fromkeys([memory_key(self._device), CPU])
        return {"message": "Weight transfer initialized", "memory": list(memory)}

    async def start_weight_update(self, http: web.BaseRequest) -> Json:
        """Stop running steps until finish_weight_update. Requests must be paused and the weights awake. An update in
        progress starts again: all weights must be resent."""
        if self.engine.busy and not self._frozen:
            raise ApiError(409, "requests are running; POST /pause first")
        if "weights" in self._asleep:
            raise ApiError(409, "the weights are asleep; POST /wake_up?tags=weights first")
        overwritten = self._update is not None and self._update.overwritten
        self._end_update()
        self._update = WeightUpdate(self.engine.model, overwritten)
        return {"message": "Weight update started"}

    async def update_weights(self, http: web.BaseRequest) -> Json:
        info = (await _body(http)).get("update_info")
        update = self._need_update()
        try:
            update.load(info)
        except WeightsError as error:
            raise ApiError(400, str(error)) from error
        return {"message": "Weights updated"}

    async def finish_weight_update(self, http: web.BaseRequest) -> Json:
        """Finish an update. Without a `weight_version`, cancel it, or refuse if any weight has been overwritten."""
        version = (await _body(http)).get("weight_version")
        update = self._need_update()
        if version is not None:
            if not isinstance(version, str):
                raise ApiError(400, f"weight_version: {version!r} is not a string")
            try:
                update.check_whole()
            except WeightsError as error:
                raise ApiError(400, f"weight_version: {error}") from error
            self.engine.weight_version = version
            # vLLM keeps these features until its own /reset_encoder_cache
            self.engine.reset_encoder_cache()
        elif update.overwritten:
            raise ApiError(409, "weights have been overwritten: send all weights, and finish with a weight_version")
        self._end_update()
        self._work.set()
        return {"message": "Weight update finished"}

    def _need_update(self) -> WeightUpdate:
        if self._update is None:
            raise ApiError(400, "no weight update has been started; POST /start_weight_update first")
        if "weights" in self._asleep:
            raise ApiError(409, "the weights are asleep; POST /wake_up?tags=weights and /start_weight_update first")
        return self._update

    def _end_update(self) -> None:
        if self._update is not None:
            self._update.close()
            self._update = None

    async def weight_info(self, http: web.BaseRequest) -> Json:
        return {"weight_version": self.engine.weight_version}

    async def weight_checker(self, http: web.BaseRequest) -> Json:
        action = (await _body(http)).get("action")
        if action != "checksum":
            raise ApiError(400, f"action: {action!r} is not supported by the embedded engine; only checksum is")
        if "weights" in self._asleep:
            raise ApiError(409, "the weights are asleep; POST /wake_up?tags=weights first")
        # the engine keeps running: only an update changes weights, and its sender waits for these checksums
        return {"checksums": await asyncio.to_thread(checksums, self.engine.model)}

    # ---- cache and sleep

    async def reset_prefix_cache(self, http: web.BaseRequest) -> Json:
        running = http.query.get("reset_running_requests", "false").lower() in ("true", "1")
        return {"success": self.engine.reset_prefix_cache(running)}

    async def reset_encoder_cache(self, http: web.BaseRequest) -> Json:
        self.engine.reset_encoder_cache()
        return {}

    async def sleep(self, http: web.BaseRequest) -> Json:
        """Free the cache's memory and, on a GPU, move weights and adapters to host memory (level 1). Parts woken in the
        meantime sleep again. If requests are running, `mode` is required, as in /pause; kept requests recompute
        their cache after /wake_up."""
        if http.query.get("level", "1") != "1":
            raise ApiError(400, f"level: {http.query['level']!r} is not supported by the embedded engine; only 1 is")
        if self._update and not self._update.overwritten:
            raise ApiError(409, "a weight update is under way; POST /finish_weight_update first")
        # the server may sleep during an update whose sender died: the next update must send all weights
        if self._asleep != {"weights", "kv_cache"}:
            was_open, was_frozen = self._open.is_set(), self._frozen
            if self.engine.busy and "mode" not in http.query:
                raise ApiError(409, "requests are running; POST /pause first, or set mode=abort, wait or keep")
            try:
                if self.engine.busy:
                    await self._pause(http.query["mode"])
                self.engine.sleep()
                self._asleep = {"weights", "kv_cache"}
            except MemoryError as error:
                raise ApiError(500, f"cannot sleep, stays awake: {error}") from error
            finally:
                self._frozen = was_frozen
                if was_open:
                    self._open.set()
                self._work.set()
        return {"status": "sleeping", "level": 1}

    async def wake_up(self, http: web.BaseRequest) -> Json:
        """Undo /sleep, for all parts or those named by `tags` (weights, kv_cache)."""
        tags = set(http.query.getall("tags", [])) or {"weights", "kv_cache"}
        if unknown := tags - {"weights", "kv_cache"}:
            raise ApiError(400, f"tags: {min(unknown)!r} is not one of weights, kv_cache")
        wanted = tags & self._asleep
        try:
            self.engine.wake("weights" in wanted, "kv_cache" in wanted)
        except MemoryError as error:
            raise ApiError(500, f"cannot wake up, stays asleep: {error}") from error
        self._asleep -= tags
        self._work.set()
        return {"status": "sleeping" if self._asleep else "awake"}

    async def is_sleeping(self, http: web.BaseRequest) -> Json:
        return {"is_sleeping": bool(self._asleep)}

    # ---- models

    async def health(self, http: web.BaseRequest) -> Json:
        return {}

    async def metrics(self, http: web.BaseRequest) -> str:
        engine = self.engine
        return write_load(
            Load(
                waiting=len(engine.waiting),
                running=len(engine.running),
                cache=engine.cache_usage,
                prompt_tokens=engine.computed_tokens + engine.cached_tokens,
                generation_tokens=engine.generation_tokens,
                cached_tokens=engine.cached_tokens,
            )
        )

    async def models(self, http: web.BaseRequest) -> Json:
        base = {
            "id": self.served_model_name,
            "object": "model",
            "owned_by": "agentfactory",
            "root": self.engine.model.config.name_or_path,
            "parent": None,
            "max_model_len": self.engine.max_model_len,
        }
        adapters = [
            {"id": a.name, "object": "model", "owned_by": "agentfactory", "root": a.path, "parent": base["id"]}
            for a in self.adapters.values()
        ]
        return {"object": "list", "data": [base, *adapters]}

    def load_adapter(self, name: str, path: str) -> None:
        """Serve the adapter in folder `path` under `name`. Raises AdapterError."""
        if name == self.served_model_name:
            raise AdapterError(f"The lora adapter '{name}' conflicts with a served base model.")
        if name in self.adapters:
            raise AdapterError(f"The lora adapter '{name}' has already been loaded, from {self.adapters[name].path}.")
        self.adapters[name] = self.engine.adapters.load(name, path)

    async def load_lora_adapter(self, http: web.BaseRequest) -> Json:
        body = await _body(http)
        name, path = body.get("lora_name"), body.get("lora_path")
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if unknown := body.keys() - {"lora_name", "lora_path"}:
            raise ApiError(400, f"{min(unknown)}: not supported by the embedded engine")
        try:
            self.load_adapter(name, path)
        except AdapterError as error:
            raise ApiError(400, str(error)) from error
        return {"message": f"Success: LoRA adapter '{name}' added successfully."}

    async def unload_lora_adapter(self, http: web.BaseRequest) -> Json:
        """Remove the adapter immediately, as vLLM does; running requests finish with the adapter they started with."""
        name = (await _body(http)).get("lora_name")
        if name not in self.adapters:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
        del self.adapters[name]
        return {"message": f"Success: LoRA adapter '{name}' removed successfully."}

    async def openapi(self, http: web.BaseRequest) -> Json:
        return {
            "openapi": "3.1.0",
            "info": {"title": "AgentFactory embedded engine", "version": "0.2.0"},
            "paths": {
                path: {method.lower(): {"responses": {"200": {"description": "OK"}}}}
                for path, (method, _) in ROUTES.items()
            },
        }


ROUTES: dict[str, tuple[str, Handler]] = {
    "/inference/v1/generate": ("POST", Server.generate),
    "/pause": ("POST", Server.pause),
    "/resume": ("POST", Server.resume),
    "/is_paused": ("GET", Server.is_paused),
    "/health": ("GET", Server.health),
    "/v1/models": ("GET", Server.models),
    METRICS_ROUTE: ("GET", Server.metrics),
    "/openapi.json": ("GET", Server.openapi),
    "/init_weight_transfer_engine": ("POST", Server.init_weight_transfer_engine),
    "/start_weight_update": ("POST", Server.start_weight_update),
    "/update_weights": ("POST", Server.update_weights),
    "/finish_weight_update": ("POST", Server.finish_weight_update),
    "/weight_info": ("GET", Server.weight_info),
    "/weight_checker": ("POST", Server.weight_checker),
    "/reset_prefix_cache": ("POST", Server.reset_prefix_cache),
    "/reset_encoder_cache": ("POST", Server.reset_encoder_cache),
    "/sleep": ("POST", Server.sleep),
    "/wake_up": ("POST", Server.wake_up),
    "/is_sleeping": ("GET", Server.is_sleeping),
    "/v1/load_lora_adapter": ("POST", Server.load_lora_adapter),
    "/v1/unload_lora_adapter": ("POST", Server.unload_lora_adapter),
}


def _answer(body: Json | str, status: int = 200) -> web.Response:
    if isinstance(body, str):
        return web.Response(text=body, status=status)
    return web.Response(body=json.dumps(body).encode(), status=status, content_type="application/json")


def _finish(finished: "asyncio.Future[None]", request: Request) -> None:
    if not finished.done():  # done: the client has disconnected
        finished.set_result(None)


async def _body(http: web.BaseRequest) -> Json:
    raw = await http.read()
    try:
        body = json.loads(raw) if raw else {}
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body
