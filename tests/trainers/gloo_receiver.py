"""A server that receives weights like vLLM's `nccl` engine, but over gloo: for tests without a GPU.

Run as a process: `python gloo_receiver.py WEIGHTS [FAULT]`; prints its address. It cuts the stream of weights like
`packed_nccl_broadcast_consumer` in vLLM 0.32, from names, dtypes and shapes alone. FAULT: `refuses` answers
/update_weights with 400."""

import hashlib
import json
import math
import sys
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from agentfactory.rollout.inference.server_metrics import METRICS_ROUTE, Load, write_load


class Worker:
    def __init__(self, weights: dict[str, Tensor], fault: str) -> None:
        self.weights = weights
        self.fault = fault
        self.version = "default"
        self.calls: list[str] = []

    def join(self, info: dict[str, Any]) -> None:
        """Join with rank_offset as the rank, since there is one worker."""
        assert info["packed"] is True
        self.buffer_bytes = info["packed_buffer_size_bytes"]
        size, wait = info["world_size"], timedelta(seconds=60)
        store = dist.TCPStore(info["master_address"], info["master_port"], size, is_master=False, timeout=wait)
        self.group = dist.ProcessGroupGloo(store, info["rank_offset"], size, wait)

    def receive(self, info: dict[str, Any]) -> None:
        pending: list[tuple[str, list[int], torch.dtype, int]] = []
        for name, dtype_name, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            dtype = getattr(torch, dtype_name)
            pending.append((name, shape, dtype, math.prod(shape) * dtype.itemsize))
            if sum(size for *_, size in pending) > self.buffer_bytes:
                self.unpack(pending)
                pending = []
        if pending:
            self.unpack(pending)

    def unpack(self, pending: list[tuple[str, list[int], torch.dtype, int]]) -> None:
        sizes = [size for *_, size in pending]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        self.group.broadcast(buffer, 0).wait()
        self.calls.append(f"buffer of {len(pending)}")
        for (name, shape, dtype, _), part in zip(pending, buffer.split(sizes), strict=True):
            self.weights[name] = part.clone().view(dtype).view(shape)

    def checksums(self) -> dict[str, str]:
        sums = {n: hashlib.sha256(w.contiguous().view(-1).view(torch.uint8).numpy()) for n, w in self.weights.items()}
        return {f"dp0:pp0:pcp0:tp0:{name}": digest.hexdigest() for name, digest in sums.items()}


def handler(worker: Worker) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers: dict[str, Any] = {
                METRICS_ROUTE: write_load(Load(0, 0, 0.0)),
                "/v1/models": {"data": [{"id": "policy", "parent": None}]},
                "/get_world_size": {"world_size": 1},
                "/weight_info": {"weight_version": worker.version},
                "/calls": {"calls": worker.calls},
            }
            self.answer(answers[self.path])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            route = self.path.partition("?")[0]
            worker.calls.append(self.path)
            if route == "/init_weight_transfer_engine":
                worker.join(body["init_info"])
            elif route == "/update_weights":
                if worker.fault == "refuses":
                    return self.answer({"error": "out of memory"}, 400)
                worker.receive(body["update_info"])
            elif route == "/finish_weight_update":
                worker.version = body["weight_version"]
            elif route == "/weight_checker":
                return self.answer({"checksums": worker.checksums()})
            self.answer({"success": True})

        def answer(self, body: dict[str, Any] | str, status: int = 200) -> None:
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def main() -> None:
    worker = Worker(load_file(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(worker))
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
