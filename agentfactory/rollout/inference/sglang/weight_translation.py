"""Updates of full weights in SGLang's API, from files or by a broadcast of the trainer, and the checksums that prove
them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfactory.rollout.inference.sglang.upstream import ApiError, Sglang

ON_CPU, ON_GPU = "sglang_cpu", "sglang_gpu"
"""Prefixes of checksums: SGLang hashes differently on a CPU and on a GPU; see weight_hashes.py."""
UNKNOWN = "unknown"
"""As in rollout/inference/weight_digest.py, which needs torch."""
_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1}
_BYTES |= {"uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass
class _Group:
    """The process group of the trainer and SGLang's workers."""

    name: str
    buffer_bytes: int


class WeightUpdates:
    """The updates of one SGLang server. Several requests of our protocol make one update."""

    def __init__(self, sglang: Sglang, workers: int, on_gpu: bool) -> None:
        """`workers` are the processes that hold the model."""
        self._sglang = sglang
        self.workers = workers
        self.process_group = "nccl" if on_gpu else "gloo"
        """The backend of torch.distributed in which the workers receive a broadcast."""
        self._on_gpu = on_gpu
        self._group: _Group | None = None
        self._session = False  # SGLang's, between begin_weight_update and end_weight_update
        self._loaded = False

    async def join(self, info: Any) -> None:
        """Let SGLang's workers join the trainer's process group; {}, for updates from files, needs none. Returns when
        all have joined."""
        if not info:
            return
        needed = {"master_address", "master_port", "rank_offset", "world_size", "packed_buffer_size_bytes"}
        if not isinstance(info, dict) or not info.keys() >= needed:
            raise ApiError(400, f"init_info: with SGLang, it is {{}} or has {', '.join(sorted(needed))}")
        if self._group is not None:
            await self._sglang.post("/destroy_weights_update_group", {"group_name": self._group.name})
            self._group = None
        # a trainer that died may have left SGLang's session open; without one, this answers 400
        await self._sglang.request("POST", "/end_weight_update", {})
        port = int(info["master_port"])
        name = group_name(port)
        body = {
            "master_address": info["master_address"],
            "master_port": port,
            "rank_offset": info["rank_offset"],
            "world_size": info["world_size"],
            "group_name": name,
            "backend": self.process_group,
        }
        await self._sglang.post("/init_weights_update_group", body)
        self._group = _Group(name, int(info["packed_buffer_size_bytes"]))

    async def start(self) -> None:
        """Begin an update. One in progress starts again: all weights must be resent."""
        await self._end_session()
        self._loaded = False

    async def load(self, info: Any) -> None:
        """Load all weights from {"path": FOLDER}, or receive {names, dtype_names, shapes} from the trainer."""
        match info:
            case {"path": str(path), **rest} if not rest:
                await self._load_folder(Path(path))
            case {"names": list(names), "dtype_names": list(dtypes), "shapes": list(shapes)}:
                await self._receive(names, dtypes, shapes)
            case _:
                raise ApiError(400, 'update_info: with SGLang, it is {"path": FOLDER} or {names, dtype_names, shapes}')
        self._loaded = True

    async def finish(self, version: Any) -> None:
        """Finish an update, and name its weights `version` (None: keep the name)."""
        await self._end_session()
        if version is None:
            return
        if not isinstance(version, str):
            raise ApiError(400, f"weight_version: {version!r} is not a string")
        if not self._loaded:
            raise ApiError(400, "weight_version: no weights were updated; POST /update_weights first")
        # by default, SGLang would abort all requests
        await self._sglang.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def checksums(self) -> dict[str, str]:
        """Return the checksum of each weight, by worker and name: "FUNCTION:HEX", without dtype and shape, which SGLang
        does not tell. The trainer cannot know which slice a worker of several holds, so these are unknown."""
        body = {"action": "checksum", "selector": "target"}
        ranks = (await self._sglang.post("/weights_checker", body)).get("ranks") or []
        function = (ON_GPU if self._on_gpu else ON_CPU) if len(ranks) == 1 else UNKNOWN
        found: dict[str, str] = {}
        for rank in ranks:
            place = rank["parallelism_info"][0]
            worker = f"dp0:pp{place['pp_rank']}:pcp0:tp{place['tp_rank']}:"
            found |= {f"{worker}{name}": f"{function}:{checksum}" for name, checksum in rank["checksums"].items()}
        return found

    async def _load_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ApiError(400, f"update_info.path: {folder} is not a folder, and SGLang reads a folder of safetensors")
        # the trainer drops the caches in a step of its own
        await self._sglang.post("/update_weights_from_disk", {"model_path": str(folder), "flush_cache": False})

    async def _receive(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        if self._group is None:
            raise ApiError(400, "update_info: SGLang has joined no process group; POST /init_weight_transfer_engine")
        buckets = list(cut(names, dtypes, shapes, self._group.buffer_bytes))
        await self._sglang.post("/begin_weight_update", {"selector": "target"})
        self._session = True
        for part in buckets:
            body = {
                "names": names[part],
                "dtypes": dtypes[part],
                "shapes": shapes[part],
                "group_name": self._group.name,
                "load_format": "flattened_bucket",
                "selector": "target",
                "flush_cache": False,
            }
            await self._sglang.post("/update_weights_from_distributed", body)

    async def _end_session(self) -> None:
        if self._session:
            await self._sglang.post("/end_weight_update", {})
            self._session = False


def group_name(port: int) -> str:
    """Return the name of the process group whose store is at `port` of the trainer. torch refuses a name twice."""
    return f"agentfactory-{port}"


def cut(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], most: int) -> Iterator[slice]:
    """Yield the slices of the weights that the trainer broadcasts together: a buffer ends with the weight that exceeds
    `most` bytes, as in trainers/sync/nccl_sync.py.

    Raises ApiError for an unknown dtype, and for weights that SGLang could not read in place.
    """
    if not len(names) == len(dtypes) == len(shapes) > 0:
        raise ApiError(400, "update_info: names, dtype_names and shapes must be lists of one length, at least 1")
    start = size = 0
    for index, (name, dtype, shape) in enumerate(zip(names, dtypes, shapes, strict=True)):
        if dtype not in _BYTES:
            raise ApiError(400, f"update_info: {name} has dtype {dtype!r}, which is not supported with SGLang")
        if size % _BYTES[dtype]:
            raise ApiError(400, f"update_info: {name} ({dtype}) would begin at byte {size} of its buffer: not aligned")
        size += math.prod(shape) * _BYTES[dtype]
        if size > most:
            yield slice(start, index + 1)
            start, size = index + 1, 0
    if start < len(names):
        yield slice(start, len(names))
