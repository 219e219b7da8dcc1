"""Proof of content: the weights on a server are, byte for byte, the trainer's."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from agentfactory.trainers.server_control import ServerControl, SyncError


def prove_full_weights(server: ServerControl, label: str, state: dict[str, Tensor]) -> str:
    """Raises SyncError unless the server reports that it serves version `label` and its checksums match `state`;
    returns their digest."""
    echoed = server.get("/weight_info").get("weight_version")
    if echoed != label:
        raise SyncError(f"{server.url} says that it serves version {echoed!r} after taking version {label!r}")
    return check_content(state, server.post("/weight_checker", {"action": "checksum"}).get("checksums", {}))


def file_digest(file: Path) -> str:
    """Returns the sha256 of a file, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# vLLM stacks these projections along the output dimension, under one name
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_VOCABULARY_MULTIPLE = 64


def check_content(state: dict[str, Tensor], checksums: dict[str, str]) -> str:
    """Raises SyncError unless the server's checksums match `state`, weight by weight; returns the sha256 of names and
    checksums, in hex.

    A checksum is the sha256 of a parameter's bytes in row-major order, as vLLM computes it. A server may put its worker
    before a name ("dp0:pp0:pcp0:tp0:"), stack projections, list a tied head, and pad a vocabulary to a multiple of 64
    with zeros. One server process has whole weights.
    """
    unproven = set(state)
    for key, checksum in checksums.items():
        name = key.rsplit(":", 1)[-1]
        if name == _HEAD and _HEAD not in state:
            name = _EMBEDDINGS
        parts = [name]
        for stacked, projections in _STACKED.items():
            if f".{stacked}." in name:
                parts = [name.replace(f".{stacked}.", f".{projection}.") for projection in projections]
        missing = [part for part in parts if part not in state]
        if missing:
            raise SyncError(f"the server holds {key}, and {missing[0]} was not sent")
        tensors = [state[part] for part in parts]
        if parameter_digest(tensors) != checksum and parameter_digest([*tensors, _filling(name, tensors)]) != checksum:
            raise SyncError(f"the server's {key} differs from the trainer's after the update")
        unproven -= set(parts)
    if unproven:
        raise SyncError(f"the server gives no checksum for {', '.join(sorted(unproven)[:3])}")
    return hashlib.sha256(repr(sorted(checksums.items())).encode()).hexdigest()


def _filling(name: str, tensors: list[Tensor]) -> Tensor:
    """Returns the zeros that a server may add below the rows of a vocabulary."""
    rows = -tensors[0].shape[0] % _VOCABULARY_MULTIPLE if name in (_EMBEDDINGS, _HEAD) else 0
    return tensors[0].new_zeros((rows, *tensors[0].shape[1:]))


def parameter_digest(parts: list[Tensor]) -> str:
    """Returns the sha256 over the bytes of tensors, one after the other, in hex."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
