"""vLLM's own ipc engine in a process of its own, with shared memory of a CPU in place of a GPU's; see vllm_ipc.py.

A line of JSON in, a line out: init_info, then update_info by update_info, then null for the digests."""

import hashlib
import json
import sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from types import SimpleNamespace

import torch

BLOCKS = []


def rebuild(name: str, size: int, *rest: object) -> torch.Tensor:
    """In place of rebuild_cuda_tensor."""
    assert rest[-1] == 3, "the engine names its own device"
    block = SharedMemory(name)
    resource_tracker.unregister(f"/{name}", "shared_memory")
    BLOCKS.append(block)
    return torch.frombuffer(block.buf, dtype=torch.uint8, count=size)


def main() -> None:
    """Serve stdin."""
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid="GPU-of-this-test")  # type: ignore[assignment]
    torch.multiprocessing.reductions.rebuild_cuda_tensor = rebuild
    torch.accelerator.synchronize = lambda: None  # type: ignore[assignment]
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    loaded = {}
    engine = IPCWeightTransferEngine.__new__(IPCWeightTransferEngine)
    engine.device = SimpleNamespace(index=3)
    engine.model = SimpleNamespace(load_weights=loaded.update)
    from vllm.distributed.weight_transfer.packed_tensor import PackedBufferImporter

    engine._packed_importer = PackedBufferImporter()
    engine.init_transfer_engine(engine.parse_init_info(json.loads(sys.stdin.readline())))
    print(json.dumps("ready"), flush=True)
    while (info := json.loads(sys.stdin.readline())) is not None:
        try:
            engine.update_weights(info)
        except ValueError as error:
            print(json.dumps(str(error)), flush=True)
            continue
        print(json.dumps("loaded"), flush=True)
    assert len(BLOCKS) == 1, "the buffer is opened once"
    digests = {
        name: hashlib.sha256(value.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
        for name, value in loaded.items()
    }
    print(json.dumps(digests), flush=True)


if __name__ == "__main__":
    main()
