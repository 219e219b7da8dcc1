"""An aiohttp server with vLLM's routes for the embedded engine, whose steps run in the event loop's thread."""

import asyncio

from aiohttp import web

from agentfactory.rollout.inference.embedded.adapters import Adapter
from agentfactory.rollout.inference.embedded.device_memory import CPU, memory_key
from agentfactory.rollout.inference.embedded.engine import Engine
from agentfactory.rollout.inference.embedded.generate_route import answer, make_request
from agentfactory.rollout.inference.embedded.sampling import HeldImage
from agentfactory.rollout.inference.embedded.weight_updates import WeightUpdate, checksums
from agentfactory.rollout.inference.http_server import ApiError, BadRequest, Json, ProtocolServer, body_of
from agentfactory.rollout.inference.server_metrics import Load, write_load
from agentfactory.rollout.text.stop_strings import Decode

# Event loop iterations after each step, in which sockets are read, requests parsed and responses written.
LOOP_TURNS = 4


class Server(ProtocolServer):
    """One server: the engine, its adapters, and the state of pause, sleep and weight updates."""

    def __init__(
        self,
        engine: Engine,
        *,
        served_model_name: str,
        eos_token_ids: frozenset[int] = frozenset(),
        api_key: str,
        decode: Decode | None = None,
        quantization: str | None = None,
    ) -> None:
        """`decode` converts ids to text, for stop strings. With `quantization`, the weights are rounded."""
        super().__init__("the embedded engine", api_key, engine.max_model_len, engine.encoder is not None)
        self.engine = engine
        self.served_model_name = served_model_name
        self.eos_token_ids = eos_token_ids
        self.adapters: dict[str, Adapter] = {}
        self._decode = decode
        self._quantization = quantization
        self._asleep: set[str] = set()  # subset of "weights", "kv_cache"
        self._frozen = False  # paused with requests kept: no steps
        self._update: WeightUpdate | None = None  # from start_weight_update to finish_weight_update: no steps
        self._open = asyncio.Event()  # set unless paused: admits new requests
        self._open.set()
        self._work = asyncio.Event()
        self._in_flight: set[asyncio.Event] = set()  # one per request, set at its end

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

    # ---- generation

    async def generate(self, http: web.BaseRequest) -> Json:
        body = await body_of(http)
        held: list[HeldImage] = []
        if parts := body.get("content_parts"):
            if self.engine.encoder is None:
                raise BadRequest(f"content_parts: the model `{self.served_model_name}` reads only text")
            try:
                held = await self.engine.encoder.images.receive(parts)
            except ValueError as error:
                raise BadRequest(f"content_parts: {error}") from error
        while not self._open.is_set():
            await self._open.wait()
        if self._asleep:
            raise ApiError(503, "the server is asleep; POST /wake_up first")
        finished = asyncio.Event()
        of_model = self._adapter(body), self.engine, self.eos_token_ids
        request = make_request(body, *of_model, lambda _: finished.set(), held, self._decode)
        self.engine.add(request)
        self._in_flight.add(finished)
        self._work.set()
        try:
            await finished.wait()
        except asyncio.CancelledError:  # the client has disconnected
            self.engine.abort(request)
            raise
        finally:
            self._in_flight.discard(finished)
        if request.finish_reason == "error":
            raise ApiError(500, "the model's logits contain NaN: its weights or the adapter have diverged")
        return answer(body, request, self.eos_token_ids)

    def _adapter(self, body: Json) -> Adapter | None:
        name = body.get("model") or self.served_model_name
        if name == self.served_model_name:
            return None
        if not isinstance(name, str):
            raise BadRequest(f"model: {name!r} is no name")
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
            raise BadRequest(f"mode: {mode!r} is not one of abort, wait, keep")
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
            await asyncio.gather(*(finished.wait() for finished in self._in_flight))

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
        self._refuse_rounded()
        if (await body_of(http)).get("init_info") not in (None, {}, {"packed": True}):
            raise BadRequest('init_info: the file backend takes {}, the ipc backend {"packed": true}')
        memory = dict.fromkeys([memory_key(self.engine.device), CPU])
        return {"message": "Weight transfer initialized", "memory": list(memory)}

    async def start_weight_update(self, http: web.BaseRequest) -> Json:
        """Stop running steps until finish_weight_update. Requests must be paused and the weights awake. An update in
        progress starts again: all weights must be resent."""
        self._refuse_rounded()
        if self.engine.busy and not self._frozen:
            raise ApiError(409, "requests are running; POST /pause first")
        if "weights" in self._asleep:
            raise ApiError(409, "the weights are asleep; POST /wake_up?tags=weights first")
        overwritten = self._update is not None and self._update.overwritten
        self._end_update()
        self._update = WeightUpdate(self.engine.model, overwritten)
        return {"message": "Weight update started"}

    async def update_weights(self, http: web.BaseRequest) -> Json:
        info = (await body_of(http)).get("update_info")
        self._need_update().load(info)
        return {"message": "Weights updated"}

    async def finish_weight_update(self, http: web.BaseRequest) -> Json:
        """Finish an update. Without a `weight_version`, cancel it, or refuse if any weight has been overwritten."""
        version = (await body_of(http)).get("weight_version")
        update = self._need_update()
        if version is not None:
            if not isinstance(version, str):
                raise BadRequest(f"weight_version: {version!r} is not a string")
            update.check_whole()
            self.engine.weight_version = version
            # vLLM keeps these features until its own /reset_encoder_cache
            self.engine.reset_encoder_cache()
        elif update.overwritten:
            raise ApiError(409, "weights have been overwritten: send all weights, and finish with a weight_version")
        self._end_update()
        self._work.set()
        return {"message": "Weight update finished"}

    def _refuse_rounded(self) -> None:
        """Refuse full weights after rounding: they would differ from the trainer's, and no checksum could prove it."""
        if self._quantization is not None:
            problem = f"this server's weights are rounded (--quantization {self._quantization})"
            fix = "train an adapter (model.lora.rank), or serve the model without server.quantization"
            raise BadRequest(f"{problem}: it accepts adapters, not full weights; {fix}")

    def _need_update(self) -> WeightUpdate:
        if self._update is None:
            raise BadRequest("no weight update has been started; POST /start_weight_update first")
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
        action = (await body_of(http)).get("action")
        if action != "checksum":
            raise self.unsupported("action", action, "checksum")
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
            raise self.unsupported("level", http.query["level"], "1")
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
            raise BadRequest(f"tags: {min(unknown)!r} is not one of weights, kv_cache")
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
                # a slot holds one context
                blocks=engine.max_num_seqs,
                block_size=engine.max_model_len,
            )
        )

    async def models(self, http: web.BaseRequest) -> Json:
        engine, of = self.engine, {"object": "model", "owned_by": "agentfactory"}
        base = {"id": self.served_model_name, **of, "root": engine.model.config.name_or_path, "parent": None}
        adapters = [{"id": a.name, **of, "root": a.path, "parent": base["id"]} for a in self.adapters.values()]
        return {"object": "list", "data": [{**base, "max_model_len": engine.max_model_len}, *adapters]}

    def load_adapter(self, name: str, path: str) -> None:
        """Serve the adapter in folder `path` under `name`. Raises BadRequest."""
        if name == self.served_model_name:
            raise BadRequest(f"The lora adapter '{name}' conflicts with a served base model.")
        if name in self.adapters:
            raise BadRequest(f"The lora adapter '{name}' has already been loaded, from {self.adapters[name].path}.")
        self.adapters[name] = self.engine.adapters.load(name, path)

    async def load_lora_adapter(self, http: web.BaseRequest) -> Json:
        body = await body_of(http)
        name, path = body.get("lora_name"), body.get("lora_path")
        if not (isinstance(name, str) and name and isinstance(path, str) and path):
            raise BadRequest("Both 'lora_name' and 'lora_path' must be provided.")
        if unknown := body.keys() - {"lora_name", "lora_path"}:
            raise BadRequest(f"{min(unknown)}: not supported by the embedded engine")
        self.load_adapter(name, path)
        return {"message": f"Success: LoRA adapter '{name}' added successfully."}

    async def unload_lora_adapter(self, http: web.BaseRequest) -> Json:
        """Remove the adapter immediately, as vLLM does; running requests finish with the adapter they started with."""
        name = (await body_of(http)).get("lora_name")
        if not isinstance(name, str) or name not in self.adapters:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
        del self.adapters[name]
        return {"message": f"Success: LoRA adapter '{name}' removed successfully."}
