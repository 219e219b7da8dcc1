"""A continuous-batching decode loop over one preallocated KV cache, for transformers models with attention layers.

Every step flattens the new tokens of all running requests into one row [1, tokens], which is all that linear layers
get. `Engine._attention` writes keys and values into the cache and lets each request attend to its own slot. A slot
keeps its tokens after its request has ended, so the next request with this prefix computes only the rest."""

import itertools
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentfactory.base.processes.memory import give_back_freed
from agentfactory.rollout.inference.embedded.adapters import AdapterLayers, Segment, segments
from agentfactory.rollout.inference.embedded.cuda_graphs import StaticDecoder
from agentfactory.rollout.inference.embedded.device_memory import Evictable
from agentfactory.rollout.inference.embedded.packed_linear import drop_packed, use_onednn
from agentfactory.rollout.inference.embedded.sampling import Request, UnsupportedModel, sample, score_prompt
from agentfactory.rollout.inference.embedded.start_check import check_last_position, proofs
from agentfactory.rollout.inference.embedded.step_plan import Plan, Planner, attend, head_width, sliding_window
from agentfactory.rollout.inference.sequence_lengths import position_limit, proof_length

if TYPE_CHECKING:
    from agentfactory.rollout.inference.embedded.image_encoder import ImageEncoder

# new prompt tokens per step, by device; bounds how long decoding requests wait for prompts. Two cores take a second for
# 256 of a 0.5B, and are no faster with more.
PREFILL_TOKENS = {"cuda": 2048, "cpu": 256}
MASK_ELEMENTS = 2**23  # queries x keys of one prefill chunk; bounds the memory of its attention mask
LOGIT_ELEMENTS = 2**24  # tokens x vocabulary of one chunk of scored prompts; bounds the memory of its logits
SHARE_TOKENS = 16  # a request waits for a shared prompt in progress if that saves more tokens than this
_engines = itertools.count()
logger = logging.getLogger(__name__)


class Engine:
    """A decoder of requests with `model`. The caller drives it: `add`, then `step` while `busy`. Not thread-safe. The
    cache holds `max_model_len` tokens for each of `max_num_seqs` concurrent sequences. With `static_decode` (None: on a
    GPU), steps without new prompts have fixed shapes. With an `encoder`, prompts may contain images. Raises
    UnsupportedModel if the model cannot be decoded exactly this way."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_model_len: int,
        max_num_seqs: int,
        weight_version: str = "default",
        static_decode: bool | None = None,
        encoder: "ImageEncoder | None" = None,
    ) -> None:
        config = model.config.get_text_config()
        window = sliding_window(config)
        limit = position_limit(config.to_dict())
        if limit is not None and max_model_len > limit.length:
            raise UnsupportedModel(f"{limit.reason}: lower server.max_model_len={max_model_len} to {limit.length}")
        if model._is_stateful:
            raise UnsupportedModel(f"{type(model).__name__} keeps a state of each sequence beside keys and values")
        if not model._supports_attention_backend:
            raise UnsupportedModel(f"{type(model).__name__} does not use transformers' attention interface")
        self.model = model.eval()
        self.encoder = encoder
        self.device = model.device
        self.adapters = AdapterLayers(model)
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.vocab_size: int = config.vocab_size
        self.weight_version = weight_version
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        # prompt tokens computed, prompt tokens found in the cache, and tokens sampled so far
        self.computed_tokens = self.cached_tokens = self.generation_tokens = 0
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = getattr(config, "num_key_value_heads", None) or self._heads
        self._head_dim = head_width(config)
        self._length = -(-max_model_len // 16) * 16  # key lengths aligned for GPU attention kernels
        self.cache_shape = (config.num_hidden_layers, 2, max_num_seqs, self._kv_heads, self._length, self._head_dim)
        # Per slot: its token ids, the number of known ids, the number of ids with keys and values in the cache, the
        # hash of the adapter and cache salt that computed them, the time of the last use, the rotary position of a
        # sampled token minus its index, and whether a request occupies the slot.
        self._ids = np.zeros((max_num_seqs, self._length), np.int64)
        self._known, self._computed, self._shared_by, self._used, self._shift = np.zeros((5, max_num_seqs), np.int64)
        self._held = np.zeros(max_num_seqs, bool)
        self._clock = 0
        self._planner = Planner(self._heads, self._kv_heads, self._length, model.dtype, model.device, window)
        self._plan: Plan | None = None
        self._weights: Evictable | None = None
        self._evicted: list[Evictable] = []
        self.cache: Tensor | None = None
        use_onednn(model)  # before the cache exists: for a moment, the largest weight has two copies
        self.allocate_cache()
        self._attention_name = f"agentfactory_embedded_{next(_engines)}"
        ALL_ATTENTION_FUNCTIONS.register(self._attention_name, self._attention)
        self.static: StaticDecoder | None = None
        self._prove()
        cuda = self.device.type == "cuda"
        if cuda if static_decode is None else static_decode:
            self.static = StaticDecoder(self._forward, self._planner, max_num_seqs, capture=cuda)
            self._prove_static()

    # ---- requests

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def cache_usage(self) -> float:
        return float(self._known[self._held].sum()) / self._ids.size

    def requests(self) -> list[Request]:
        return self.running + self.waiting

    def add(self, request: Request) -> None:
        """Queue a request. The caller must check the ids, and that 0 < len(prompt) < max_model_len."""
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request with the tokens sampled so far; does nothing if it has already ended."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self.running.remove(request)
            self._release(request)
        else:
            return
        request.finish_reason = "abort"
        request.on_finish(request)

    def _release(self, request: Request) -> None:
        self._clock += 1
        self._used[request.slot] = self._clock
        self._held[request.slot] = False
        if request.finish_reason == "error" and self.cache is not None:
            # a NaN would spoil the slot's next sequence even at a masked position
            self.cache[:, :, request.slot] = 0
            self._known[request.slot] = self._computed[request.slot] = 0

    # ---- cache

    def allocate_cache(self) -> None:
        """Allocate the cache, with empty slots. Raises MemoryError if there is too little memory."""
        self.reset_prefix_cache(reset_running_requests=True)
        gib = np.prod(self.cache_shape) * self.model.dtype.itemsize / 2**30
        cuda = self.device.type == "cuda"
        free = (torch.cuda.mem_get_info(self.device)[0] if cuda else psutil.virtual_memory().available) / 2**30
        if gib > free:
            raise MemoryError(
                f"the KV cache of {self.max_num_seqs} x {self.max_model_len} tokens needs {gib:.1f} GiB and "
                f"{free:.1f} GiB are free: lower max_num_seqs or max_model_len"
            )
        try:
            # zeros, not empty: a masked position must not contain NaN
            self.cache = torch.zeros(self.cache_shape, dtype=self.model.dtype, device=self.device)
        except RuntimeError as error:  # what torch's allocators raise
            raise MemoryError(f"the KV cache needs {gib:.1f} GiB: {error}") from error
        # each layer's keys and values as rows [slots * kv_heads * length, head_dim], to which steps write
        self._rows = [[kv.view(-1, self._head_dim) for kv in layer] for layer in self.cache]

    def sleep(self) -> None:
        """Free the memory of the cache; on a GPU, also move weights and adapters to host memory. Running requests
        recompute their cache after `wake`. Raises MemoryError, with the engine unchanged, if the host lacks room."""
        if self.device.type == "cuda" and not self._evicted:
            self._weights = self._weights or Evictable([*self.model.parameters(), *self.model.buffers()], pin=True)
            factors = Evictable(self.adapters.tensors(), pin=False)
            factors.evict()
            try:
                self._weights.evict()
            except MemoryError:
                factors.restore()
                raise
            self._evicted = [self._weights, factors]
        self.cache, self._rows, self._plan = None, [], None
        self.adapters.segments = self.adapters.sampled_segments = []
        if self.static is not None:
            self.static.clear()
        drop_packed(self.model)
        self.reset_encoder_cache()
        torch.cuda.empty_cache()  # does nothing where CUDA is not in use
        give_back_freed()

    def wake(self, weights: bool, cache: bool) -> None:
        """Undo `sleep` for the given parts. Raises MemoryError, with the engine unchanged, if they do not fit."""
        restored: list[Evictable] = []
        try:
            for evictable in self._evicted if weights else []:
                evictable.restore()
                restored.append(evictable)
            if cache and self.cache is None:
                self.allocate_cache()
        except MemoryError:
            for evictable in restored:
                evictable.evict()
            torch.cuda.empty_cache()
            give_back_freed()
            raise
        if weights:
            self._evicted = []

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Discard all keys and values. While requests run, do nothing and return False, unless `reset_running_requests`
        is set: then they recompute their keys and values with the current weights in the next steps."""
        if self.running and not reset_running_requests:
            return False
        self._computed[:] = 0
        self._used[~self._held] = 0
        return True

    def reset_encoder_cache(self) -> None:
        """Discard the vision tower's features; the next prompts with these images compute them again."""
        if self.encoder is not None:
            self.encoder.clear()

    # ---- admission

    def _place(self, request: Request) -> bool:
        """Give `request` the slot with the least to compute. Return False if it should wait for a shared prompt."""
        prompt, size = request.prompt, len(request.prompt)
        shared_by = hash((request.adapter.serial if request.adapter else 0, request.cache_salt))
        same = self._ids[:, : size - 1] == prompt[:-1]  # always compute the last token: its logits are needed
        shared = np.where(same.all(1), size - 1, same.argmin(1) if size > 1 else 0)
        sharing = (self._shared_by == shared_by) & (not request.fresh)
        shared = np.where(sharing, np.minimum(shared, self._known), 0)
        usable = np.minimum(shared, self._computed)
        best = int(usable.argmax())
        if (shared[self._held] > usable[best] + SHARE_TOKENS).any():
            return False
        # Continue in place if that loses nothing; otherwise copy the shared prefix to the idle slot of the least value:
        # its tokens over the time since their use, squared, since those of ended chains are many.
        extends = ~self._held & (usable == self._computed) & (usable == usable[best])
        value = np.where(self._held, np.inf, self._computed / (self._clock - self._used + 1) ** 2)
        slot = int(extends.argmax() if usable[best] and extends.any() else value.argmin())
        prefix = int(usable[best])
        if slot != best and usable[slot] < prefix:
            assert self.cache is not None
            self.cache[:, :, slot, :, :prefix] = self.cache[:, :, best, :, :prefix]
        self._ids[slot, :size] = prompt
        self._known[slot], self._computed[slot], self._shared_by[slot] = size, prefix, shared_by
        self._held[slot] = True
        self._shift[slot] = request.images.shift if request.images else 0
        request.slot = slot
        self.cached_tokens += prefix
        return True

    # ---- one step

    @torch.inference_mode()
    def step(self) -> None:
        """Compute up to PREFILL_TOKENS new prompt tokens, and one token of every decoding request."""
        for request in sorted(self.waiting, key=lambda request: request.priority):
            if len(self.running) < self.max_num_seqs and self._place(request):
                self.waiting.remove(request)
                self.running.append(request)
        if not self.running:
            return
        requests = sorted(self.running, key=lambda r: (r.adapter.serial if r.adapter else 0, r.slot))
        slots = np.array([r.slot for r in requests])
        start, known = self._computed[slots], self._known[slots]
        count = known - start
        budget = min(PREFILL_TOKENS[self.device.type], MASK_ELEMENTS // int(known.max()))
        prompts = np.where(count > 1, count, 0)
        # the last prompt token is followed by a sampled one
        last = [-1 if r.prompt_logprobs is None else len(r.prompt) - 1 for r in requests]
        scored = start < np.array(last)
        if scored.any():
            # no more rows of logits than a step of decoding may have, or few elements
            budget = min(budget, max(self.max_num_seqs, LOGIT_ELEMENTS // self.vocab_size))
        spent = prompts.cumsum() - prompts
        count = np.where(count > 1, np.clip(budget - spent, 0, count), count)
        if not count.all():
            kept = count > 0
            requests = [r for r, keep in zip(requests, kept, strict=True) if keep]
            slots, start, known, count, scored = slots[kept], start[kept], known[kept], count[kept], scored[kept]
        end = start + count
        after = count.cumsum()
        position = np.arange(after[-1]) + np.repeat(end - after, count)
        slot_of = np.repeat(slots, count)
        sampled = np.flatnonzero(end == known)
        # the tokens whose logits are needed, and their number up to each request
        needed = np.repeat(scored, count)
        needed[after[sampled] - 1] = True
        upto = needed.cumsum()[after - 1]

        ids, rotary = self._ids[slot_of, position], position + self._shift[slot_of]
        adapters, tensor = [request.adapter for request in requests], self._planner.tensor
        # a single remaining prompt token may belong to an image
        if self.static is not None and len(sampled) == len(ids) and ids.min() >= 0:
            logits = self.static.decode(slots, ids, position, rotary, adapters, self._computed)
        else:
            more: dict[str, Any] = {}
            if self.encoder is not None:
                ids, rotary, more = self.encoder.prepare(requests, ids, rotary, start, after)
            having = np.flatnonzero(np.diff(upto, prepend=0))
            logits = self._forward(
                self._planner.plan(slots, start, count, position),
                segments(adapters, after),
                tensor(ids),
                tensor(rotary),
                keep=tensor(np.flatnonzero(needed)),
                kept=segments([adapters[i] for i in having], upto[having]),
                **more,
            )
            self._plan = None  # frees its masks before the sampler and the next step need memory
        self._computed[slots] = end
        self.computed_tokens += int(count[count > 1].sum())
        for i in np.flatnonzero(scored):
            score_prompt(requests[i], int(start[i]), logits[upto[i] - count[i] : upto[i]])
        if len(sampled):
            if len(logits) > len(sampled):
                logits = logits[torch.from_numpy(upto[sampled] - 1).to(logits.device)]
            self._extend([requests[i] for i in sampled], slots[sampled], logits)

    def _forward(
        self,
        plan: Plan,
        segments: list[Segment],
        ids: Tensor,
        rotary: Tensor,
        keep: Tensor | None = None,
        kept: list[Segment] | None = None,
        **more: Any,
    ) -> Float[Tensor, "n vocabulary"]:
        """Return the logits of the step's tokens, or only at the indices `keep`, whose segments are `kept`. `rotary`
        [tokens], or [3, tokens], are the rotary positions, and `more` the model's further arguments."""
        self._plan, self.adapters.segments = plan, segments
        self.adapters.sampled_segments = segments if kept is None else kept
        logits: Tensor = self.model(
            input_ids=ids[None],
            position_ids=rotary.unsqueeze(-2),
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
            **more,
        ).logits
        return logits[0]

    def _attention(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend to the cache; the model's attention modules call this through transformers' attention interface."""
        for name in ("softcap", "position_bias", "indices", "block_indices"):
            if kwargs.get(name) is not None:
                raise UnsupportedModel(f"attention with {name}")
        window, sinks = kwargs.get("sliding_window"), kwargs.get("s_aux")
        if window is not None and window != self._planner.window:
            raise UnsupportedModel(f"layers with different sliding windows, {window} and {self._planner.window}")
        assert self._plan is not None
        assert self.cache is not None
        layer, width = module.layer_idx, value.shape[-1]
        assert isinstance(layer, int)
        heads, widest = (query.shape[1], key.shape[1]), max(key.shape[-1], width)
        if heads != (self._heads, self._kv_heads) or widest > self._head_dim:
            raise UnsupportedModel(
                f"layer {layer} has {heads[0]} query and {heads[1]} key heads of width {widest}, where the "
                f"configuration has {self._heads} and {self._kv_heads} of width {self._head_dim}"
            )
        scale = scaling or query.shape[-1] ** -0.5
        # values may be narrower than keys, and a layer's heads than another's
        query = F.pad(query, (0, self._head_dim - query.shape[-1]))
        for rows, new in zip(self._rows[layer], (key, value), strict=True):
            new = F.pad(new, (0, self._head_dim - new.shape[-1]))
            rows.index_copy_(0, self._plan.rows, new[0].transpose(0, 1).reshape(-1, self._head_dim))
        found = attend(self._plan, self.cache[layer], query, scale, window is not None, sinks)[..., :width]
        # some models view it in another shape
        return found.contiguous(), None

    # ---- sampling

    def _extend(self, requests: list[Request], slots: np.ndarray, logits: Float[Tensor, "n vocabulary"]) -> None:
        tokens, distribution = sample(logits, requests)
        logprobs = distribution.gather(1, torch.tensor(tokens, device=distribution.device)[:, None])[:, 0].tolist()
        self._ids[slots, self._known[slots]] = tokens
        self._known[slots] += 1
        self.generation_tokens += len(tokens)
        sampled = zip(requests, tokens, logprobs, self._known[slots].tolist(), strict=True)
        for row, (request, token, logprob, known) in enumerate(sampled):
            if request.candidates:
                request.candidate_logprobs.append(distribution[row, request.candidates].tolist())
            if logprob != logprob:
                request.finish_reason = "error"  # NaN: the weights or the adapter have diverged
            else:
                label = request.adapter.name if request.adapter else self.weight_version
                if not request.versions or request.versions[-1][0] != label:
                    request.versions.append((label, len(request.tokens)))
                request.tokens.append(token)
                request.logprobs.append(logprob)
                if token in request.stop:
                    request.finish_reason = "stop"
                elif request.watch and (stop_string := request.watch.completed(request.tokens)):
                    request.finish_reason, request.stop_string = "stop", stop_string
                elif len(request.tokens) >= request.max_tokens or known >= self.max_model_len:
                    request.finish_reason = "length"
            if request.finish_reason:
                self._release(request)
                request.on_finish(request)
        self.running = [r for r in self.running if not r.finish_reason]

    # ---- proof

    @property
    def _language(self) -> PreTrainedModel:
        """The network whose attention is replaced. Of a text model, `get_decoder` may return the head."""
        return self.model if self.encoder is None else self.model.get_decoder()

    def _prove(self) -> None:
        """Decode a few requests together, and reject a model whose own attention computes otherwise."""
        language = self._language
        own = "sdpa" if self.model._supports_sdpa else "eager"
        beyond = proof_length(self.model.config.get_text_config().to_dict(), self.max_model_len)
        try:
            language.set_attn_implementation(own)
            check_last_position(self.model, self.max_model_len)
            cases = list(proofs(self.encoder, self.vocab_size, self.max_model_len, beyond))
            language.set_attn_implementation(self._attention_name)
            for case in cases:
                self.add(case.request)
            while self.busy:
                self.step()
            self.reset_prefix_cache()
            language.set_attn_implementation(own)
            for case in cases:
                case.check(self.model)
        except (UnsupportedModel, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # each model has its own
            told = f"fails in a first decoding: {type(error).__name__}: {error}"
            raise UnsupportedModel(f"{type(self.model).__name__} {told}") from error
        language.set_attn_implementation(self._attention_name)

    def _prove_static(self) -> None:
        """Repeat the comparison with static steps. If they cannot be captured, warn and decode without them."""
        try:
            self._prove()
        except (RuntimeError, UnsupportedModel) as error:
            if self.device.type != "cuda":
                raise
            self.static = None
            for request in self.requests():
                self.abort(request)
            self._language.set_attn_implementation(self._attention_name)
            self.reset_prefix_cache()
            logger.warning("decoding without CUDA graphs, which is slower: %s", error)
