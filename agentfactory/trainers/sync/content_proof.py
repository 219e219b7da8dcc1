"""Proof that a server's weights equal the trainer's byte for byte. A server may have other names, stacks and slices:
see `layouts`, which knows those of vLLM 0.32 and 0.33 by names and shapes, and reads no weight."""

import hashlib
import logging
import math
import re
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice, product

import torch
from torch import Tensor

from agentfactory.base.errors import some
from agentfactory.base.run_notices import notify
from agentfactory.rollout.inference.weight_digest import FUNCTIONS, ON_CPU, ON_GPU, UNKNOWN, sglang_hash, weight_digest
from agentfactory.trainers.networks.handover import HandedOver
from agentfactory.trainers.sync.server_control import ServerControl, SyncError

_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"

_PREFIXES = (
    ("language_model.model.", "model.language_model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("visual.", "model.visual."),
    ("vision_tower.", "model.vision_tower."),
    ("vision_model.", "model.vision_model."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
"""Prefixes of names: the server's, and the trainer's (transformers' names in memory). For a multimodal model trained as
a text model, the trainer's names lack `language_model.`."""

_STACKED = (
    (".qkv_proj.", (".q_proj.", ".k_proj.", ".v_proj.")),
    (".gate_up_proj.", (".gate_proj.", ".up_proj.")),
    (".in_proj_qkvz.", (".in_proj_qkv.", ".in_proj_z.")),
    (".in_proj_ba.", (".in_proj_b.", ".in_proj_a.")),
)
"""Projections that the server stacks along the output dimension, under one name."""

_EXPERTS = re.compile(r"\.experts\.(routed_experts\.)?w(13|2)_(weight|bias)$")


@dataclass(frozen=True)
class Worker:
    rank: int = 0
    count: int = 1

    @classmethod
    def of_keys(cls, keys: Sequence[str]) -> "dict[str, Worker]":
        """Return the worker of each key such as "dp0:pp0:pcp0:tp1:NAME"; a bare name belongs to the only worker."""
        ranks = {key: int(found[1]) if (found := re.search(r"(?:^|:)tp(\d+):", key)) else 0 for key in keys}
        return {key: cls(rank, max(ranks.values()) + 1) for key, rank in ranks.items()}


@dataclass(frozen=True)
class Layout:
    """One possible composition of a server's parameter from the trainer's weights."""

    names: tuple[str, ...]
    pieces: tuple[Tensor, ...]
    """The stacked tensors. A worker has its slice of each, not of the whole."""
    dim: int = 0
    vocabulary: bool = False
    """True if the server may add rows of zeros."""
    swapped: bool = False
    """True if the pieces are in the opposite order."""

    @property
    def key(self) -> tuple[object, ...]:
        return self.names, len(self.pieces), self.dim, self.swapped

    def arranged(self, shape: Sequence[int], worker: Worker) -> Tensor | None:
        """Return a worker's parameter of this shape, without padding; None if the layout has no such shape."""
        whole = list(self.pieces[0].shape)
        whole[self.dim] = sum(piece.shape[self.dim] for piece in self.pieces)
        if list(shape) == whole:
            return self.stack(self.pieces)
        if self.vocabulary and len(shape) == len(whole) and list(shape[1:]) == whole[1:]:
            start = min(worker.rank * shape[0], whole[0])
            return self.pieces[0][start : start + shape[0]] if shape[0] * worker.count >= whole[0] else None
        sliced = [d for d, size in enumerate(whole) if len(shape) == len(whole) and shape[d] != size]
        if len(sliced) != 1 or worker.count == 1:
            return None
        [d] = sliced
        sizes = [piece.shape[d] // worker.count for piece in self.pieces]
        if d == self.dim and sum(sizes) < shape[d] and len(sizes) == 3:
            # with fewer key-value heads than workers, several workers have the same heads
            sizes[1:] = [(shape[d] - sizes[0]) // 2] * 2
        if min(sizes) == 0 or (sum(sizes) if d == self.dim else sizes[0]) != shape[d]:
            return None
        pairs = list(zip(self.pieces, sizes, strict=True))
        starts = [worker.rank * piece.shape[d] // size // worker.count * size for piece, size in pairs]
        return self.stack([p.narrow(d, start, size) for (p, size), start in zip(pairs, starts, strict=True)])

    def stack(self, pieces: Sequence[Tensor]) -> Tensor:
        return pieces[0] if len(pieces) == 1 else torch.cat(tuple(pieces), self.dim)


def layouts(name: str, state: Mapping[str, Tensor]) -> Iterator[Layout]:
    """Yield the possible layouts of a server's parameter `name`, the most likely first; none if it is unknown. An equal
    name in the checkpoint comes before a stack: some networks (Phi-3, GLM-4) have stacked projections themselves."""
    for own in _names(name):
        if own in state:
            yield Layout((own,), _pieces(own, state), vocabulary=own.endswith((_EMBEDDINGS, _HEAD)))
        for stacked, projections in _STACKED:
            parts = tuple(own.replace(stacked, projection) for projection in projections)
            if stacked in own and all(part in state for part in parts):
                yield Layout(parts, tuple(state[part] for part in parts))
        if _EXPERTS.search(own):
            yield from _experts(own, state)
    if name.endswith(_HEAD):
        # tied
        for own in _names(name.removesuffix(_HEAD) + "model." + _EMBEDDINGS):
            if own in state:
                yield Layout((own,), (state[own],), vocabulary=True)


def _names(name: str) -> Iterator[str]:
    """Yield the trainer's possible names for a server's name."""
    yield name
    for server, trainer in _PREFIXES:
        if name.startswith(server):
            yield trainer + name.removeprefix(server)


def _pieces(name: str, state: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the pieces that a stacked weight of the checkpoint consists of."""
    weight = state[name]
    if ".gate_up_proj." in name:
        return weight.chunk(2)
    if ".qkv_proj." in name:
        output = state.get(re.sub(r"\.qkv_proj\..*", ".o_proj.weight", name))
        if output is not None and (rest := len(weight) - output.shape[1]) > 0 and rest % 2 == 0:
            return weight.split([output.shape[1], rest // 2, rest // 2])
    return (weight,)


def _experts(name: str, state: Mapping[str, Tensor]) -> Iterator[Layout]:
    """Yield the layouts of all experts of a layer: gate and up projections in either order ("w13"), or down ("w2")."""
    match = _EXPERTS.search(name)
    assert match is not None
    stem, is_gate_up, kind = name[: match.start()] + ".experts.", match[2] == "13", match[3]
    bias = "_bias" if kind == "bias" else ""
    fused = f"{stem}{'gate_up_proj' if is_gate_up else 'down_proj'}{bias}"
    if fused in state:
        names: tuple[str, ...] = (fused,)
        halves = state[fused].chunk(2, 1) if is_gate_up else (state[fused],)
    else:
        projections = ("gate_proj", "up_proj") if is_gate_up else ("down_proj",)
        numbers = range(sum(1 for other in state if other.startswith(stem) and other.endswith(f".down_proj.{kind}")))
        each = [[f"{stem}{number}.{projection}.{kind}" for number in numbers] for projection in projections]
        names = tuple(other for listed in each for other in listed)
        if not names or any(other not in state for other in names):
            return
        halves = tuple(torch.stack([state[other] for other in listed]) for listed in each)
    yield Layout(names, tuple(halves), dim=1)
    if is_gate_up:
        yield Layout(names, tuple(halves[::-1]), dim=1, swapped=True)


logger = logging.getLogger(__name__)

_VOCABULARY_MULTIPLE = 64
_MOST_PENDING = 2**29
"""Maximum bytes of weights held until their digests are computed."""


Served = Mapping[str, Mapping[str, str]]


def served_checksums(server: ServerControl) -> dict[str, str]:
    """Return the checksums of a server's weights, by worker and name. Raises SyncError."""
    found: dict[str, str] = server.post("/weight_checker", {"action": "checksum"}).get("checksums", {})
    return found


@dataclass
class _Expected:
    """A digest to compare with a server's checksum, if the server's layout has not changed."""

    name: str
    checksum: str
    worker: Worker
    layout: tuple[object, ...]
    missing: set[str]
    """The trainer's names of required weights that have not been read yet."""
    needs: tuple[str, ...]


class Content:
    """The trainer's weights of one version. Each digest is computed once, on the weight's own device."""

    def __init__(self, state: Mapping[str, Tensor], served: Served | None = None, keep: bool = True) -> None:
        """`state` must not change before the last proof. With `served`, the checksums of the previous version, a thread
        computes digests for the same layouts during the transfer.

        `state` may be without values (device "meta"), which `passing` then provides. Without `keep`, no weight is held
        for longer than its digest takes, and only the layouts in `served` can be proven."""
        self.state = dict(state)
        self.served: dict[str, Mapping[str, str]] = {}
        self._keep = keep
        self._digests: dict[object, str | None] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "digests")  # starts its thread with the first task
        self._pending: deque[tuple[HandedOver[None], int]] = deque()
        self._waiting: defaultdict[str, list[_Expected]] = defaultdict(list)
        self._uses: Counter[str] = Counter()
        for expected in self._expect(served or {}):
            for name in expected.needs:
                self._waiting[name].append(expected)
            self._uses.update(expected.needs)
        for name, value in state.items():
            if not value.is_meta:
                self._arrived(name)

    def passing(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights`, and receive them as values of `state`."""
        for name, value in weights:
            if self._keep or self._uses[name]:
                self.state[name] = value
            self._arrived(name)
            yield name, value

    def prove(self, server: ServerControl, label: str) -> str:
        """Raise SyncError unless the server reports version `label` and its checksums match; return their digest."""
        echoed = server.get("/weight_info").get("weight_version")
        if echoed != label:
            raise SyncError(f"{server.url} reports version {echoed!r} after it accepted version {label!r}")
        checksums = served_checksums(server)
        digest = self.check(checksums, len(server.replicas()))
        self.served[server.url] = checksums
        return digest

    def check(self, checksums: dict[str, str], replicas: int = 1) -> str:
        """Raise SyncError unless the checksums of all `replicas` of a server match, weight by weight; return the sha256
        of names and checksums, in hex. A checksum is a `weight_digest`, or the sha256 of a parameter's bytes in
        row-major order, as vLLM computes it without our plugin, or SGLang's (see `sglang_hash`). A server may prefix
        names with its worker ("dp0:pp0:pcp0:tp0:") and pad a vocabulary with zeros. Weights in an unknown layout are
        reported, and only the canary proves them."""
        # several servers are proven concurrently, and mostly need the same digests
        with self._lock:
            while self._pending:
                self._pending.popleft()[0].result()
            self._pool.shutdown()
            return self._check(checksums, replicas)

    def _check(self, checksums: dict[str, str], replicas: int) -> str:
        workers = Worker.of_keys(list(checksums))
        unproven = {_replica(key): set(self.state) for key in checksums}
        unknown = set()
        if len(unproven) != replicas:
            raise SyncError(f"the server has {replicas} replicas, but returned checksums of {len(unproven)}")
        for key, checksum in checksums.items():
            name = key.rsplit(":", 1)[-1]
            possible = list(layouts(name, self.state))
            found = next((layout for layout in possible if self._matches(layout, workers[key], checksum)), None)
            if found is not None:
                unproven[_replica(key)] -= set(found.names)
            elif not possible or checksum.startswith(UNKNOWN):
                unknown.add(name)
            elif _EXPERTS.search(name) and (":" not in checksum or checksum.startswith((f"{ON_CPU}:", f"{ON_GPU}:"))):
                unknown.add(name)  # vLLM without our plugin, and SGLang, may have reordered them without reporting it
            else:
                raise SyncError(f"the server's {key} differs from the trainer's after the update")
        left = set().union(*unproven.values())
        if left and not unknown:
            raise SyncError(f"the server returned no checksum for {some(left)}")
        if unknown:
            text = f"the server has {some(unknown)} under a name or in a layout that the trainer does not know; of the "
            text += f"trainer's {len(self.state)} weights, only the canary proves {len(left)}"
            notify(logger, "weights that only the canary proves", text, see="docs/servers.md")
        return hashlib.sha256(repr(sorted(checksums.items())).encode()).hexdigest()

    def _expect(self, served: Served) -> Iterator[_Expected]:
        for checksums in served.values():
            workers = Worker.of_keys(list(checksums))
            for key, checksum in checksums.items():
                name = key.rsplit(":", 1)[-1]
                # kept weights can still be digested in another layout at the comparison
                for layout in islice(layouts(name, self.state), 1 if self._keep else None):
                    yield _Expected(name, checksum, workers[key], layout.key, set(layout.names), layout.names)

    def _arrived(self, name: str) -> None:
        for expected in self._waiting.pop(name, []):
            expected.missing.discard(name)
            if not expected.missing:
                size = sum(self.state[needed].nbytes for needed in expected.needs)
                self._pending.append((HandedOver(self._pool, partial(self._digest_early, expected)), size))
        while not self._keep and sum(size for _, size in self._pending) > _MOST_PENDING:
            self._pending.popleft()[0].result()

    def _digest_early(self, expected: _Expected) -> None:
        for layout in layouts(expected.name, self.state):
            if layout.key == expected.layout:
                self._matches(layout, expected.worker, expected.checksum)
        for name in expected.needs:
            self._uses[name] -= 1
            if not self._keep and not self._uses[name]:
                self.state[name] = self.state[name].to("meta")

    def _matches(self, layout: Layout, worker: Worker, checksum: str) -> bool:
        if checksum.startswith(UNKNOWN):
            return False
        function, _, rest = checksum.partition(":")
        if not rest:
            # compute both, since each may be needed later
            return checksum in [self._sha256(layout, filled) for filled in {False, layout.vocabulary}]
        if function in (ON_CPU, ON_GPU):
            return any(rest == digest for digest in self._sglang_digests(layout, function))
        if function not in FUNCTIONS:
            problem = f"the server's checksums use {function!r}, and this release knows {' and '.join(FUNCTIONS)}"
            raise SyncError(f"{problem}: install the same release of AgentFactory in both environments")
        dtype, shape, digest = rest.split(":")

        def digest_here() -> str | None:
            sizes = [int(size) for size in shape.split("x")] if shape else []
            arranged = layout.arranged(sizes, worker)
            # a server stores a few weights in another precision than sent
            converted = arranged.to(getattr(torch, dtype)) if arranged is not None else None
            return weight_digest(converted, function).rpartition(":")[2] if converted is not None else None

        return self._digest(layout, (function, worker, dtype, shape), digest_here) == digest

    def _sglang_digests(self, layout: Layout, function: str) -> Iterator[str | None]:
        """Yield the hashes that a weight may have in SGLang, which reports neither its shape nor its dtype."""

        def sglang(filled: bool, dtype: torch.dtype | None) -> str:
            whole = layout.stack(layout.pieces)
            if filled:
                whole = torch.cat([whole, whole.new_zeros(-len(whole) % _VOCABULARY_MULTIPLE, *whole.shape[1:])])
            return sglang_hash(whole.to(dtype) if dtype is not None else whole, function)

        # a server stores a few weights in another precision than sent
        for filled, dtype in product({False, layout.vocabulary}, (None, torch.float32)):
            yield self._digest(layout, (function, filled, dtype), partial(sglang, filled, dtype))

    def _sha256(self, layout: Layout, filled: bool) -> str | None:
        def sha256() -> str:
            whole = layout.stack(layout.pieces)
            zeros = -len(whole) % _VOCABULARY_MULTIPLE * math.prod(whole.shape[1:]) * whole.itemsize if filled else 0
            content = whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            return hashlib.sha256(content + bytes(zeros)).hexdigest()

        return self._digest(layout, ("sha256", filled), sha256)

    def _digest(self, layout: Layout, form: tuple[object, ...], compute: Callable[[], str | None]) -> str | None:
        key = (layout.key, form)
        if key not in self._digests:
            if any(piece.is_meta for piece in layout.pieces):
                problem = f"the server has {some(set(layout.names))} in another layout than before the update"
                raise SyncError(f"{problem}: it was restarted with other options; resume the run")
            self._digests[key] = compute()
        return self._digests[key]


def _replica(key: str) -> str:
    """Return the replica in a checksum's key, "dp0" in "dp0:pp0:pcp0:tp0:NAME"; "" for a key without worker."""
    return key.split(":")[0] if key.startswith("dp") and ":" in key else ""
