"""The ipc backend on a CPU: shared memory, against embedded engines. CUDA handles are untested: they need a GPU."""

import base64
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentfactory.rollout.inference.embedded.device_memory import SharedBuffers, SharedMemoryError
from agentfactory.rollout.inference.embedded.weight_updates import WeightUpdate
from agentfactory.rollout.inference.http_server import BadRequest
from agentfactory.rollout.inference.weight_digest import weight_digest
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.sync.content_proof import Content
from agentfactory.trainers.sync.ipc_sync import Buffer, IpcSync, parts, update_info
from agentfactory.trainers.sync.server_control import ServerControl, ServerGoneError, SyncError
from tests.conftest import embedded_server
from tests.trainers.scored import disturb
from tests.trainers.test_sync import sampled, scored

SMALL = 9000
"""A buffer that takes several parts, the largest weight being 8192 bytes."""


def give_first_weights(server: ServerControl, model_folder: Path) -> None:
    """Restore a server's first weights."""
    for path, body in (
        *(("/pause?mode=keep", {}), ("/start_weight_update", {})),
        ("/update_weights", {"update_info": {"path": str(model_folder / "model.safetensors")}}),
        *(("/finish_weight_update", {"weight_version": "0"}), ("/reset_prefix_cache", {}), ("/resume", {})),
    ):
        server.post(path, body)


@pytest.fixture(scope="module", autouse=True)
def _leave_the_server_as_it_was(server: ServerControl, model_folder: Path) -> Iterator[None]:
    yield
    give_first_weights(server, model_folder)


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that every block of shared memory created by a test is removed afterwards."""
    made, syncs = [], []
    make, allocate = Buffer.__init__, IpcSync._allocate

    def make_and_note(buffer: Buffer, capacity: int, device: torch.device) -> None:
        make(buffer, capacity, device)
        made.append(buffer.handles["cpu"][0])

    def allocate_and_note(sync: IpcSync, state: dict[str, Tensor]) -> None:
        syncs.append(sync)
        allocate(sync, state)

    monkeypatch.setattr(Buffer, "__init__", make_and_note)
    monkeypatch.setattr(IpcSync, "_allocate", allocate_and_note)
    yield
    for sync in syncs:
        sync.close()
    for name in made:
        with pytest.raises(FileNotFoundError):
            SharedMemory(name)


@pytest.mark.processes
def test_full_weights_arrive_in_parts(policy: Policy, server: ServerControl) -> None:
    sync = IpcSync([server], device=torch.device("cpu"), buffer_bytes=SMALL)
    for version in (0, 1, 2):
        state = policy.gather()
        assert sum(1 for _ in parts(state, SMALL)) > 3
        report = sync.push(version, policy, state)
        assert (report.version, report.label, report.model) == (version, str(version), "policy")
        assert report.bytes == sum(value.nbytes for value in state.values())
        assert report.digest == Content(state).check({name: weight_digest(v) for name, v in state.items()})
        tokens, logprobs, versions = sampled(server, report.model)
        assert versions == [str(version)]
        assert logprobs == pytest.approx(scored(policy, tokens), abs=1e-4)
        disturb(policy, version)
    sync.close()


@pytest.mark.processes
def test_a_server_that_lost_the_version_gets_it_back(policy: Policy, server: ServerControl, model_folder: Path) -> None:
    """It gets the weights that were pushed, although the policy has changed since."""
    with embedded_server(model_folder, "--max-model-len", "64") as url:
        servers = [server, ServerControl(url)]
        sync = IpcSync(servers, device=torch.device("cpu"), buffer_bytes=SMALL)
        disturb(policy, 1)
        report = sync.push(1, policy, policy.gather())
        disturb(policy, 2)
        expected = sampled(server, "policy")
        assert sampled(servers[1], "policy") == expected
        # the weights of a restarted server
        give_first_weights(servers[1], model_folder)
        assert sampled(servers[1], "policy") != expected
        assert sync.restore(url).digest == report.digest
        assert sampled(servers[1], "policy") == expected
        servers[1].post("/pause")
        assert sync.restore(url).version == 1
        assert servers[1].get("/is_paused")["is_paused"] is False
    # the other server continues alone
    sync.push(2, policy, policy.gather())
    assert sampled(server, "policy") != expected
    with pytest.raises(ServerGoneError):
        sync.restore(url)


def test_a_gpus_trainer_keeps_its_version_in_the_same_host_memory(server: ServerControl) -> None:
    sync, places = IpcSync([server], device=torch.device("cpu")), set()
    sync._device = torch.device("cuda")
    for version in (1.0, 2.0):
        state = {"a": torch.full((3,), version, dtype=torch.bfloat16), "b": torch.full((2, 2), version)}
        sync._keep(state, ThreadPoolExecutor(1))[0].result()
        assert all(torch.equal(sync._copy[name], value) for name, value in state.items())
        places.add(sync._copy["b"].data_ptr())
    assert len(places) == 1


def test_a_part_left_out_is_found(policy: Policy, server: ServerControl, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = IpcSync([server], device=torch.device("cpu"), buffer_bytes=SMALL)
    monkeypatch.setattr("agentfactory.trainers.sync.ipc_sync.parts", lambda *given: [*parts(*given)][:-1])
    with pytest.raises(SyncError, match=r"/finish_weight_update answered 400: .*the update lacks the tensor"):
        sync.push(7, policy, policy.gather())
    monkeypatch.undo()
    # the server is still paused, and accepts another update
    assert server.get("/is_paused")["is_paused"] is True
    sync.push(8, policy, policy.gather())
    assert sampled(server, "policy")[2] == ["8"]


def test_changed_bytes_are_found(policy: Policy, server: ServerControl, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = IpcSync([server], device=torch.device("cpu"), buffer_bytes=SMALL)
    fill = Buffer.fill

    def fill_wrongly(buffer: Buffer, part: list[tuple[str, Tensor]]) -> None:
        fill(buffer, [(name, value + 1.0) if name == "model.norm.weight" else (name, value) for name, value in part])

    monkeypatch.setattr(Buffer, "fill", fill_wrongly)
    with pytest.raises(SyncError, match=r"model\.norm\.weight differs from the trainer's after the update"):
        sync.push(9, policy, policy.gather())
    monkeypatch.undo()
    sync.push(10, policy, policy.gather())


def test_what_cannot_work_is_refused(policy: Policy, server: ServerControl, monkeypatch: pytest.MonkeyPatch) -> None:
    state = policy.gather()
    sync = IpcSync([server], device=torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
        with pytest.raises(SyncError, match=r"sync\.backend: ipc: /dev/shm has 0 MiB free.*docker run --shm-size"):
            sync.push(0, policy, state)
    # a trainer on a GPU, a server on the CPU
    monkeypatch.setattr("agentfactory.trainers.sync.ipc_sync.memory_key", lambda _: "GPU-1")
    with pytest.raises(SyncError, match=r"can read the memory of cpu, and the trainer's is GPU-1"):
        IpcSync([server], device=torch.device("cuda"))


def test_parts_are_whole_weights_that_begin_where_their_dtype_can_be_read() -> None:
    state = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(4)}
    state |= {"c": torch.ones(7, dtype=torch.int8), "d": torch.tensor(2.0)}
    assert [[name for name, _ in part] for part in parts(state, 1000)] == [["b", "d", "a", "c"]]
    assert [[name for name, _ in part] for part in parts(state, 20)] == [["b", "d"], ["a", "c"]]
    assert [[name for name, _ in part] for part in parts(state, 16)] == [["b"], ["d", "a"], ["c"]]


class Packed:
    """Tensors in a block of shared memory, and the update_info for them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        part = list(tensors.items())
        self.buffer = Buffer(sum(value.nbytes for value in tensors.values()), torch.device("cpu"))
        self.buffer.fill(part)
        self.info: dict[str, Any] = update_info(part, self.buffer)


def pickled(handles: Any) -> str:
    return base64.b64encode(pickle.dumps(handles)).decode()


def test_a_part_that_does_not_fit_changes_nothing(policy: Policy) -> None:
    network = policy.network
    names = ["model.norm.weight", "model.layers.0.input_layernorm.weight"]
    old = {name: network.state_dict()[name].clone() for name in names}
    update = WeightUpdate(network)
    new = {names[0]: torch.full((32,), 0.5), names[1]: torch.full((32,), 2.0, dtype=torch.bfloat16)}
    packed = Packed({"odd": torch.ones(1, dtype=torch.int8), **new})
    info = {key: value[1:] if isinstance(value, list) else value for key, value in packed.info.items()}
    wrong: list[tuple[dict[str, Any], str]] = [
        (packed.info, "the model has no tensor odd"),
        ({**info, "shapes": [[32], [33]]}, r"input_layernorm.weight has shape \(33,\), the model needs \(32,\)"),
        ({**info, "tensor_sizes": [128, 640]}, "needs 64 bytes; tensor_sizes has 640, and the buffer has 65 left"),
        ({**info, "dtype_names": ["float32", "load"]}, "'load', which is no dtype"),
        ({**info, "names": names[:1]}, "must be lists of one length"),
        ({**info, "ipc_handles_pickled": pickled({"GPU-2": ()})}, "for the memory of GPU-2, and the model is on cpu"),
        ({**info, "ipc_handles_pickled": pickled({"cpu": ("psm_none", 1)})}, "no shared memory psm_none on the server"),
        ({**info, "ipc_handles_pickled": "??"}, "cannot be read"),
    ]
    for case, message in wrong:
        with pytest.raises(BadRequest, match=message):
            update.load(case)
    held = network.state_dict()
    assert all(torch.equal(held[name], old[name]) for name in names)
    packed.buffer.close()
    # weights in another dtype are converted
    packed = Packed(new)
    update.load(packed.info)
    held = network.state_dict()
    assert all(torch.equal(held[name], new[name].float()) for name in names)
    with pytest.raises(BadRequest, match="lacks the tensor"):
        update.check_whole()
    update.close()
    packed.buffer.close()


def test_tied_weights_must_agree_wherever_they_come(policy: Policy) -> None:
    update = WeightUpdate(policy.network)
    embeddings = torch.ones(64, 32)
    for head, agrees in ((embeddings, True), (embeddings + 1, False)):
        first, second = Packed({"model.embed_tokens.weight": embeddings}), Packed({"lm_head.weight": head})
        update.load(first.info)
        if agrees:
            update.load(second.info)
        else:
            with pytest.raises(BadRequest, match=r"lm_head\.weight, model\.embed_tokens\.weight are tied but differ"):
                update.load(second.info)
        update.close()
        first.buffer.close()
        second.buffer.close()


class Trap:
    """A pickle that runs code."""

    def __reduce__(self) -> Any:
        return print, ("a pickle has run code",)


def test_a_handle_runs_no_code(capsys: pytest.CaptureFixture[str]) -> None:
    buffers = SharedBuffers(torch.device("cpu"))
    for trap in (Trap(), {"cpu": Trap()}):
        with pytest.raises(SharedMemoryError, match=r"builtins\.print is not allowed in a handle"):
            buffers.open(pickled(trap))
    assert capsys.readouterr().out == ""
    # torch's handle of a GPU buffer can be parsed, but opening it needs the GPU
    handle = (torch.Tensor, torch.Size([3]), (1,), 0, torch.storage.TypedStorage, torch.uint8, 0, b"handle", 3)
    with pytest.raises(SharedMemoryError, match="for the memory of GPU-1"):
        buffers.open(pickled({"GPU-1": handle}))
