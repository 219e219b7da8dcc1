"""The HTTP routes of the Tinker API, with sessions, models and sampling sessions by their ids.

The event loop answers; one thread computes passes, steps and files, in the order in which requests get their turn, so
that heartbeats and samples never wait for it."""

import asyncio
import hmac
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from agentfactory.tinker import bodies
from agentfactory.tinker.checkpoints import SAMPLER_KIND, WEIGHTS_KIND, Checkpoints, Saved, remove
from agentfactory.tinker.futures import Answer, Futures, Turns
from agentfactory.tinker.messages import PROTOBUF, PassRequest, RequestError
from agentfactory.tinker.samplers import Samplers
from agentfactory.tinker.training import Model, Trainer
from agentfactory.trainers.sync.server_control import SyncError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Handler = Callable[..., Awaitable[Any]]

_POST = (
    *("create_session", "session_heartbeat", "create_model", "get_info", "load_weights", "weights_info"),
    *("create_sampling_session", "asample", "retrieve_future"),
)
_IN_TURN = "optim_step", "save_weights", "save_weights_for_sampler"
"""Requests that take their turn among those of a model, and return a future."""
_CHECKPOINT = "training_runs/{model_id}/checkpoints/{kind}/{name}"
_ROUTES = {
    **{("POST", name): name for name in (*_POST, *_IN_TURN)},
    ("POST", "sessions/{session_id}/finish"): "finish_session",
    ("GET", "sessions"): "list_sessions",
    ("GET", "sessions/{session_id}"): "describe_session",
    ("GET", "samplers/{sampling_session_id}"): "describe_sampler",
    ("GET", "training_runs"): "list_runs",
    ("GET", "training_runs/{model_id}"): "describe_run",
    ("GET", "training_runs/{model_id}/checkpoints"): "list_checkpoints_of_run",
    ("GET", "checkpoints"): "list_checkpoints",
    ("DELETE", _CHECKPOINT): "delete_checkpoint",
    ("PUT", f"{_CHECKPOINT}/ttl"): "set_lifetime",
}
"""Route -> the method, here or in Checkpoints, that serves it; its `body` is of the type with which it is annotated."""
_OFF = "parallel_fwdbwd_chunks", "proto_compress_fwdbwd", "custom_loss_server_side", "sample_use_retrieve_futures"
_FIXED: dict[tuple[str, str], Answer] = {
    ("POST", "client/config"): dict.fromkeys((*_OFF, "sample_join_sampling_session"), False),
    ("POST", "telemetry"): {"status": "accepted"},
    ("GET", "healthz"): {"status": "ok"},
}
_POLL_SECONDS = 25.0
"""Time until a poll without an answer ends; the SDK's own timeout is 45 s."""
_MOST_BYTES = 1 << 26
_MOST_MODELS = 16
_SESSION_SECONDS, _SILENT_SECONDS, _SNAPSHOT_SECONDS = 900.0, 120.0, 1800.0
"""Time without a heartbeat after which a session ends; the same while a new model finds no room; and time without a
request after which a nameless snapshot ends."""


class Base(NamedTuple):
    """The base model: its folder, or name on the hub, the service's name of it, and others that clients may use."""

    folder: str
    name: str
    others: frozenset[str]
    context: int
    architecture: str


class Service:
    """The service for all clients that send `key`."""

    def __init__(self, base: Base, trainer: Trainer, samplers: Samplers, checkpoints: Checkpoints, key: str) -> None:
        self._base, self._trainer, self._samplers, self._checkpoints = base, trainer, samplers, checkpoints
        self._key = key.encode()
        self._thread = ThreadPoolExecutor(1, "trainer")
        self._futures = Futures()
        self._sessions: dict[str, bodies.Metadata | None] = {}
        self._models: dict[str, Model] = {}
        self._turns: dict[str, Turns] = {}
        self._sampling: dict[str, Saved | None] = {}
        """Sampling sessions of snapshots (None: of the base)."""
        self._creating: set[str] = set()
        self._forgetting: set[asyncio.Task[None]] = set()
        self._seen: dict[str, float] = {}
        """Session, or sampling session -> time of its last request."""

    def application(self) -> web.Application:
        known = {"max_context_length": self._base.context, "trainable": True, "sampleable": True}
        capabilities = {"supported_models": [{"model_name": self._base.name, **known}]}
        routes: dict[tuple[str, str], Handler] = {("POST", "forward_backward"): self.forward_backward}
        for place, answer in {**_FIXED, ("GET", "get_server_capabilities"): capabilities}.items():
            routes[place] = partial(_fixed, answer)
        for place, name in _ROUTES.items():
            method = getattr(self, name, None) or getattr(self._checkpoints, name)
            handler = method if hasattr(self, name) else partial(asyncio.to_thread, method)
            decoded = self._decoded_in_turn if name in _IN_TURN else self._decoded
            routes[place] = partial(decoded, handler, method.__annotations__["body"])
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[self._respond])
        app.add_routes([web.route(method, f"/api/v1/{path}", handler) for (method, path), handler in routes.items()])
        return app

    async def _decoded(self, handler: Handler, kind: type[Struct], request: web.Request) -> Any:
        query = dict(request.query) if request.method == "GET" else {}
        return await handler(bodies.decode(await request.read(), kind, query | request.match_info))

    async def _decoded_in_turn(self, work: Handler, kind: type[Struct], request: web.Request) -> Answer:
        """A wrong body takes its turn, too: those after it would wait for ever."""
        content = await request.read()

        async def decoded(model: Model) -> Answer:
            try:
                return await work(model, bodies.decode(content, kind))
            except RequestError:
                if kind is bodies.OptimStep:  # a step that fails drops its gradients, whatever the reason
                    await self._compute(model.optimizer.zero_grad)
                raise

        return self._in_turn(bodies.decode(content, bodies.Turn), decoded)

    @web.middleware
    async def _respond(self, request: web.Request, handler: Handler) -> web.Response:
        given = request.headers.get("X-API-Key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="replace"), self._key):
            refusal = _json({"error": "set TINKER_API_KEY as the service has printed it"}, 401)
            refusal.force_close()
            return refusal
        try:
            found = await handler(request)
        except RequestError as error:
            return _json({"error": str(error), "category": "user"}, error.status)
        except web.HTTPRequestEntityTooLarge:
            return _json({"error": f"the body has more than {_MOST_BYTES:,} bytes; send fewer data at a time"}, 413)
        except web.HTTPException as error:
            return _json({"error": f"{request.method} {request.path} is not a part of this service"}, error.status)
        if found is None:
            return web.Response(status=204)
        return found if isinstance(found, web.Response) else _json(found)

    def _compute(self, function: Callable[..., Result], *args: Any, **named: Any) -> Awaitable[Result]:
        """Call a function on the thread that computes."""
        return asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *args, **named))

    async def retrieve_future(self, body: bodies.Short) -> Answer | web.Response:
        task = self._futures[body.request_id]
        await asyncio.wait([task], timeout=_POLL_SECONDS)
        if not task.done():
            return _json({"type": "try_again", "request_id": body.request_id, "queue_state": "active"}, 408)
        answer = task.result()
        return answer if isinstance(answer, dict) else web.Response(body=answer, content_type=PROTOBUF)

    # ---- sessions

    async def create_session(self, body: bodies.Short) -> Answer:
        name = uuid.uuid4().hex
        self._sessions[name], self._seen[name] = body.user_metadata, time.monotonic()
        return {"type": "create_session", "session_id": name}

    def _keep_session(self, name: str) -> None:
        """Note a request of a session. Raises RequestError if that has ended."""
        if name not in self._sessions:
            raise RequestError(f"session_id: {name!r:.80} has ended, or its service was restarted; create another", 410)
        self._seen[name] = time.monotonic()

    async def session_heartbeat(self, body: bodies.Short) -> Answer:
        self._keep_session(body.session_id)
        return {"type": "session_heartbeat"}

    async def finish_session(self, body: bodies.Short) -> Answer:
        await self._end_session(body.session_id, "its session has ended")
        return {"status": "finished"}

    async def _end_session(self, name: str, reason: str) -> None:
        if name not in self._sessions:  # ended meanwhile
            return
        del self._sessions[name], self._seen[name]
        for model_id in _those_of(name, self._models):
            self._turns.pop(model_id).close(f"model_id: {model_id}: {reason}")
            await self._compute(self._trainer.drop, self._models.pop(model_id))
        for sampler in _those_of(name, self._sampling):
            self._end_sampler(sampler)

    def _end_sampler(self, name: str) -> None:
        saved = self._sampling.pop(name, None)
        self._seen.pop(name, None)
        if saved is not None and saved.is_nameless:
            # its running samples end first
            task = asyncio.get_running_loop().create_task(self._forget(saved))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    async def _forget(self, saved: Saved) -> None:
        try:
            await self._samplers.forget(saved)
            await asyncio.to_thread(remove, saved.folder)
        except (SyncError, OSError) as error:
            logger.warning("%s is left: %s", saved.path, error)

    async def sweep(self, silent: float = _SESSION_SECONDS) -> None:
        """End sessions without a heartbeat for `silent` seconds, and unused snapshots; first save unsaved steps."""

        def is_silent(name: str, seconds: float) -> bool:
            return time.monotonic() - self._seen.get(name, math.inf) > seconds

        for name in [name for name in self._sessions if is_silent(name, silent)]:
            for line in await self._save_unsaved(_those_of(name, self._models)):
                logger.warning("session %s: %s", name, line)
            # it may have come back meanwhile
            if is_silent(name, silent):
                told = f"its session sent no heartbeat for {silent:.0f} s"
                logger.warning("session %s ends: %s", name, told)
                await self._end_session(name, told)
        for name, saved in list(self._sampling.items()):
            if saved is not None and saved.is_nameless and is_silent(name, _SNAPSHOT_SECONDS):
                self._end_sampler(name)

    async def _save_unsaved(self, models: list[str]) -> list[str]:
        """Save the models that have made steps since their last checkpoints; return a line of each."""
        told = []
        for name in models:
            if (model := self._models.get(name)) is not None and model.steps > model.saved:
                save = partial(self._checkpoints.save, model, self._trainer, WEIGHTS_KIND, "unsaved", overwrite=True)
                try:
                    told.append(f"saved {(await self._compute(save)).path}")
                except Exception as error:  # boundary: a model that cannot be saved must not lose the others
                    told.append(f"{model.steps - model.saved} steps of {name} are lost: {error}")
                    model.saved = model.steps
        return told

    async def close(self) -> list[str]:
        """Wait for the pass that is computed, and save what is not; return a line of each model."""
        for model_id, turns in self._turns.items():
            turns.close(f"model_id: {model_id}: the service is ending")
        told = await self._save_unsaved(list(self._models))
        self._thread.shutdown()
        return told

    async def list_sessions(self, body: bodies.Short) -> Answer:
        return {"sessions": body.page(list(self._sessions))[0]}

    async def describe_session(self, body: bodies.Short) -> Answer:
        if (name := body.session_id) not in self._sessions:
            raise RequestError(f"there is no session {name!r:.80}", 404)
        told = {"training_run_ids": _those_of(name, self._models), "sampler_ids": _those_of(name, self._sampling)}
        return {**told, "user_metadata": self._sessions[name]}

    # ---- models

    def _check(self, base_model: str | None, optimizer: bodies.Optimizer) -> None:
        if base_model not in (None, self._base.name, *self._base.others):
            problem = f"base_model: got {base_model!r:.200}, and this service has {self._base.name!r}"
            raise RequestError(f"{problem}; use that, or start the service with the other as model.path")
        if optimizer.type != "adamw":
            raise RequestError(f"optimizer: got {optimizer.type!r:.80}; this service has adamw")

    async def create_model(self, body: bodies.CreateModel) -> Answer:
        model_id = f"{body.session_id}:train:{body.model_seq_id}"

        async def work() -> Answer:
            self._check(body.base_model, body.optimizer_config)
            await self._begin(model_id, body.lora_config, body.user_metadata)
            return {"type": "create_model", "model_id": model_id}

        self._keep_session(body.session_id)
        return self._futures.begin(f"{model_id}:0", work)

    async def _begin(self, model_id: str, config: bodies.Lora, metadata: bodies.Metadata | None) -> Model:
        """Create a model. Raises RequestError if there are too many, or the server does not serve such an adapter."""
        if model_id in self._models or model_id in self._creating:
            raise RequestError(f"model_seq_id: {model_id} is another model; count them")
        if len(self._models) + len(self._creating) >= _MOST_MODELS:
            await self.sweep(_SILENT_SECONDS)
        if len(self._models) + len(self._creating) >= _MOST_MODELS:
            problem = f"the service has {_MOST_MODELS} models in training, which is its limit"
            raise RequestError(f"{problem}; end a session that is not needed (ServiceClient.close)")
        self._creating.add(model_id)
        try:
            model = await self._made(model_id, config, metadata)
        finally:
            self._creating.discard(model_id)
        self._models[model_id], self._turns[model_id] = model, Turns()
        return model

    async def _made(self, model_id: str, config: bodies.Lora, metadata: bodies.Metadata | None) -> Model:
        model = await self._compute(self._trainer.create, model_id, config)
        try:
            await self._compute(self._checkpoints.begin, model, metadata)
            # servers refuse adapters of some modules, as vLLM does those of a few heads
            new = self._compute(self._checkpoints.save, model, self._trainer, SAMPLER_KIND, "_new")
            await self._forget(await self._proven(new))
            self._keep_session(model_id.partition(":")[0])
        except BaseException:
            await self._compute(self._trainer.drop, model)
            raise
        return model

    def _model(self, model_id: str) -> Model:
        if (found := self._models.get(model_id)) is None:
            told = f"model_id: {model_id!r:.120} is not in training here; create it, or load its weights"
            raise RequestError(told, 404)
        self._keep_session(model_id.partition(":")[0])
        return found

    async def get_info(self, body: bodies.Short) -> Answer:
        model_id, base, rank = body.model_id, self._base, self._model(body.model_id).config.rank
        data = {"arch": base.architecture, "model_name": base.name, "tokenizer_id": base.folder}
        return {"model_id": model_id, "model_data": data, "model_name": base.name, "is_lora": True, "lora_rank": rank}

    def _in_turn(self, turn: bodies.Turn | PassRequest, work: Callable[[Model], Awaitable[Answer]]) -> Answer:
        """Return the future of a model's request; that of the first time, if it was sent before."""
        name, model = f"{turn.model_id}:{turn.seq_id}", self._model(turn.model_id)
        if name in self._futures:
            return {"request_id": name}
        return self._futures.begin(name, self._turns[turn.model_id].wait_for(turn.seq_id, lambda: work(model)))

    async def forward_backward(self, request: web.Request) -> Answer:
        if (kind := request.content_type) != PROTOBUF or "Content-Encoding" in request.headers:
            raise RequestError(f"Content-Type: got {kind!r:.80}; send {PROTOBUF} uncompressed, as SDKs since 0.25 do")
        body = PassRequest(await request.read())
        return self._in_turn(body, lambda model: self._compute(self._trainer.run_pass, model, body))

    async def optim_step(self, model: Model, body: bodies.OptimStep) -> Answer:
        self._check(None, body.optimizer_params)
        return await self._compute(self._trainer.step, model, body.adam_params)

    # ---- checkpoints

    def _save(self, model: Model, kind: str, name: str, body: bodies.SaveWeights) -> Awaitable[Saved]:
        save = partial(self._checkpoints.save, model, self._trainer, kind, name)
        return self._compute(save, body.ttl_seconds, body.user_metadata, body.overwrite)

    async def _proven(self, saving: Awaitable[Saved]) -> Saved:
        """Return a snapshot once the server has proven it; remove one that it does not take."""
        saved = await saving
        try:
            await self._samplers.prove(saved)
        except BaseException:
            await asyncio.to_thread(remove, saved.folder)
            raise
        return saved

    async def save_weights(self, model: Model, body: bodies.SaveWeights) -> Answer:
        saved = await self._save(model, WEIGHTS_KIND, body.path or f"{body.seq_id:06d}", body)
        return {"type": "save_weights", "path": saved.path}

    async def load_weights(self, body: bodies.LoadWeights) -> Answer:
        async def load(model_id: str, model: Model | None = None) -> Answer:
            self._check(body.base_model, body.optimizer_config)
            saved = await asyncio.to_thread(self._checkpoints.find, body.path)
            if body.optimizer and not saved.optimizer.is_file():
                raise RequestError(f"optimizer: {body.path} has no optimizer's state; load a path of save_weights")
            model = model or await self._begin(model_id, saved.info.lora, body.user_metadata)
            await self._compute(self._trainer.load, model, saved.adapter, saved.optimizer if body.optimizer else None)
            return {"type": "load_weights", "path": body.path, "model_id": model_id}

        if body.model_id is not None and body.seq_id is not None:
            return self._in_turn(bodies.Turn(model_id=body.model_id, seq_id=body.seq_id), partial(load, body.model_id))
        if body.session_id is None or body.model_seq_id is None:
            raise RequestError("session_id: missing; give session_id and model_seq_id, or model_id and seq_id")
        self._keep_session(body.session_id)
        created = f"{body.session_id}:train:{body.model_seq_id}"
        return self._futures.begin(f"{created}:load", partial(load, created))

    async def save_weights_for_sampler(self, model: Model, body: bodies.SaveForSampler) -> Answer:
        if body.kind != "snapshot":
            raise RequestError(f"kind: got {body.kind!r:.80}; samplers are frozen here: use snapshot")
        number = body.sampling_session_seq_id
        # a name with _ is nobody's: the snapshot ends with its sampling session
        name = body.path or (f"{body.seq_id:06d}" if number is None else f"_{number}")
        session = f"{body.model_id.partition(':')[0]}:sample:{number}"
        if number is not None and session in self._sampling:
            raise RequestError(f"sampling_session_seq_id: {number} is another sampler's; count them")
        saved = await self._proven(self._save(model, SAMPLER_KIND, name, body))
        if number is None:
            return {"type": "save_weights_for_sampler", "path": saved.path}
        self._add_sampler(session, saved)
        return {"type": "save_weights_for_sampler", "sampling_session_id": session}

    # ---- samples

    def _add_sampler(self, name: str, saved: Saved | None) -> None:
        self._keep_session(name.partition(":")[0])
        other = self._sampling.setdefault(name, saved)
        if getattr(other, "path", None) != getattr(saved, "path", None):
            raise RequestError(f"sampling_session_seq_id: {name} is another sampler's; count them")
        self._seen[name] = time.monotonic()

    async def create_sampling_session(self, body: bodies.CreateSampler) -> Answer:
        self._check(body.base_model, bodies.Optimizer())
        name, saved = f"{body.session_id}:sample:{body.sampling_session_seq_id}", None
        if body.model_path is not None:
            saved = await asyncio.to_thread(self._checkpoints.find, body.model_path)
        elif body.base_model is None:
            raise RequestError("base_model: missing; give it, or a model_path")
        self._add_sampler(name, saved)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _sampler(self, name: str) -> Saved | None:
        if name not in self._sampling:
            raise RequestError(f"sampling_session_id: {name!r:.120} is gone, or was unused for long; save again", 404)
        self._seen[name] = time.monotonic()
        return self._sampling[name]

    async def describe_sampler(self, body: bodies.Short) -> Answer:
        saved = self._sampler(body.sampling_session_id)
        path = None if saved is None or saved.is_nameless else saved.path
        return {"sampler_id": body.sampling_session_id, "base_model": self._base.name, "model_path": path}

    async def asample(self, body: bodies.Asample) -> Answer:
        saved, name = self._sampler(body.sampling_session_id), f"{body.sampling_session_id}:{body.seq_id}"
        begun = self._futures.begin(name, lambda: self._samplers.sample(saved, body))
        return {**begun, "sample_sequence_ids": [f"{name}:{number}" for number in range(body.num_samples)]}


def _those_of(session: str, names: Iterable[str]) -> list[str]:
    """Return the models or sampling sessions of a session."""
    return [name for name in names if name.startswith(f"{session}:")]


async def _fixed(answer: Answer, request: web.Request) -> Answer:
    return answer


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")
