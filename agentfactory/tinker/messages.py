"""Protobuf of the Tinker API: requests of passes, their results, and samples. Everything else is JSON (bodies.py).

tinker_public.desc is the descriptor of the SDK (tinker 0.38, Apache-2.0), which publishes no .proto file. It is in a
pool of its own, because a program that imports the SDK has the same names in the default pool."""

import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from jaxtyping import Float, Int

PROTOBUF = "application/x-protobuf"
_MOST_VALUES = 1 << 23
"""Values of a request's tensors; a sparse one takes few bytes for many zeros."""
_FLOAT32 = 1
_TYPES: dict[int, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), 2: np.dtype("<i8")}
"""DType of the SDK's tensors -> type of their bytes."""
_UNDEFINED = (0, -99999.0)
"""Token and log-probability where top-k lists have none."""

_pool = descriptor_pool.DescriptorPool()
_pool.Add(descriptor_pb2.FileDescriptorProto.FromString(files(__package__).joinpath("tinker_public.desc").read_bytes()))


def message(name: str) -> Any:
    """Return the class of a message."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"tinker_public.{name}"))


class RequestError(Exception):
    """A request that cannot be carried out as it is; the text names the field and the fix. `status`: 404 for an id that
    the service does not know, 410 for what was there once."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class Datum(NamedTuple):
    """Input ids, and by name what the loss reads for each: arrays of shape [N] or [N, K]."""

    ids: Int[np.ndarray, "tokens"]
    inputs: dict[str, np.ndarray]


class PassRequest:
    """A request for a forward pass and, unless `forward_only`, a backward pass."""

    def __init__(self, body: bytes) -> None:
        """Raises RequestError if `body` is no such message."""
        try:
            self._message = message("ForwardBackwardRequest").FromString(body)
        except DecodeError as error:
            raise RequestError(f"the body is no ForwardBackwardRequest in protobuf: {error}") from error
        self.model_id: str = self._message.model_id
        self.seq_id: int = self._message.seq_id
        self.loss: str = self._message.loss_fn
        self.forward_only: bool = self._message.forward_only

    def options(self) -> dict[str, float]:
        """Return the loss's options. Raises RequestError for one that is no finite number."""
        given: dict[str, Any] = dict(self._message.loss_fn_config)
        for name, value in self._message.loss_fn_config_v2.items():
            given[name] = value.number if value.HasField("number") else value.text
        for name, value in given.items():
            if not (isinstance(value, float) and math.isfinite(value)):
                raise RequestError(f"loss_fn_config.{name}: got {value!r:.100}; give a finite number")
        return given

    def data(self) -> list[Datum]:
        """Return the data. Raises RequestError, which names the datum and the field."""
        if not self._message.data:
            raise RequestError("data: missing; give at least one datum")
        shapes = [tensor.shape for datum in self._message.data for tensor in datum.loss_fn_inputs.values()]
        if sum(abs(math.prod(shape)) for shape in shapes) > _MOST_VALUES:
            raise RequestError(f"data: has more than {_MOST_VALUES:,} values in loss_fn_inputs; send fewer at a time")
        return [_datum(number, datum) for number, datum in enumerate(self._message.data)]


def _datum(number: int, told: Any) -> Datum:
    parts, inputs = [np.empty(0, "<i4")], {}
    for chunk in told.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise RequestError(f"data[{number}].model_input: got a chunk {kind}; this service takes text only")
        if len(chunk.encoded_text.tokens) % 4:
            raise RequestError(f"data[{number}].model_input: its tokens are not 4 bytes each")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    for name, tensor in told.loss_fn_inputs.items():
        try:
            inputs[name] = _array(tensor)
        except ValueError as error:
            raise RequestError(f"data[{number}].loss_fn_inputs.{name}: {error}") from error
    return Datum(np.concatenate(parts).astype(np.int64), inputs)


def _array(tensor: Any) -> np.ndarray:
    """Return a tensor as a dense array. Raises ValueError."""
    kind, shape = _TYPES.get(tensor.dtype), [int(size) for size in tensor.shape]
    if kind is None:
        raise ValueError(f"its dtype is {tensor.dtype}; send float32 or int64")
    if len(shape) not in (1, 2) or not 0 < min(shape) <= max(shape) <= _MOST_VALUES:
        raise ValueError(f"its shape is {shape}; give [N] or [N, K]")
    if tensor.WhichOneof("encoding") != "sparse_csr":
        return np.frombuffer(tensor.dense, kind).reshape(shape)
    csr, found = tensor.sparse_csr, np.zeros(shape, kind)
    values, starts, columns = (
        np.frombuffer(part, of)
        for part, of in ((csr.values, kind), (csr.crow_indices, "<i8"), (csr.col_indices, "<i8"))
    )
    counts = np.diff(starts, prepend=0)
    fits = len(shape) == 2 and len(starts) == shape[0] + 1 and len(values) == len(columns) == starts[-1]
    if not (fits and counts[0] == 0 and (counts >= 0).all() and (columns >= 0).all() and (columns < shape[-1]).all()):
        raise ValueError(f"its sparse rows do not fit the shape {shape}")
    found[np.repeat(np.arange(shape[0]), counts[1:]), columns] = values
    return found


def pass_result(logprobs: Sequence[Float[np.ndarray, "tokens *several"]], metrics: Mapping[str, float]) -> bytes:
    """Return a pass's answer: the log-probabilities of each datum's targets, and metrics as `name:reduction`, by which
    clients combine the chunks of one call."""
    arrays = [np.ascontiguousarray(array, "<f4") for array in logprobs]
    joined = message("BatchedTensor")(
        data=b"".join(array.tobytes() for array in arrays),
        offsets=np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8").tobytes(),
        dtype=_FLOAT32,
        trailing_shape=arrays[0].shape[1:],
    )
    result = message("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    result.loss_fn_outputs.add(num_datums=len(arrays)).fields["logprobs"].CopyFrom(joined)
    return bytes(result.SerializeToString())


def sample_result(
    samples: Sequence[tuple[list[int], list[float], bool]], prompt: Sequence[Mapping[int, float]] | None, top_k: int
) -> bytes:
    """Return the answer to a request for samples: (ids, log-probabilities, cut by a limit). `prompt` has its scores, if
    asked for, by position: of its own token, which comes first, and of `top_k` likely ones; or of none."""
    result = message("SampleResponse")()
    for token_ids, logprobs, cut in samples:
        # STOP_REASON_STOP is 0, STOP_REASON_LENGTH 1
        own = {"tokens": np.asarray(token_ids, "<i4").tobytes(), "logprobs": np.asarray(logprobs, "<f4").tobytes()}
        result.sequences.add(stop_reason=int(cut), **own)
    if prompt is not None:
        first = [next(iter(scores.values()), math.nan) for scores in prompt]
        result.prompt_logprobs = np.asarray(first, "<f4").tobytes()
    if prompt is not None and top_k:
        best = [sorted(scores.items(), key=lambda pair: -pair[1])[:top_k] for scores in prompt]
        listed = np.asarray([[*row, *[_UNDEFINED] * (top_k - len(row))] for row in best])
        table = result.topk_prompt_logprobs
        table.k, table.length = top_k, len(listed)
        table.token_ids, table.logprobs = listed[..., 0].astype("<i4").tobytes(), listed[..., 1].astype("<f4").tobytes()
    return bytes(result.SerializeToString())
