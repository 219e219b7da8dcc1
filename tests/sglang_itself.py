"""SGLang's own classes and hashes: a process of SGLang's environment, without a server.

Each line of standard input is [class, body]; it fails at the first body that SGLang's HTTP server would not accept. It
prints the number of bodies, and for each of `weights()` the hashes on a CPU and, by Triton's interpreter, on a GPU."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch


def weights() -> list[torch.Tensor]:
    """Weights of several dtypes and sizes: parts of a word, of a tile, several tiles."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(torch.float32, 5), (torch.bfloat16, 7), (torch.bfloat16, 8192 * 2), (torch.float32, 3 * 8192 + 11)]
    sizes += [(torch.uint8, 1), (torch.float32, 8192 * 3), (torch.bfloat16, 100_001)]
    return [torch.randint(0, 250, (n,), generator=generator).to(dtype) * 3 for dtype, n in sizes]


def check(name: str, body: dict[str, Any]) -> None:
    from pydantic import TypeAdapter
    from sglang.srt.entrypoints.api_contract import generate_contract_error
    from sglang.srt.managers import io_struct
    from sglang.srt.sampling.sampling_params import SamplingParams

    request = TypeAdapter(getattr(io_struct, name)).validate_python(body)
    for field, value in body.items():
        assert getattr(request, field) == value, (name, field)
    if name == "GenerateReqInput":
        assert (problem := generate_contract_error(body)) is None, problem
        request.normalize_batch_and_arguments()
        SamplingParams(**request.sampling_params).verify(1000)


def hashes() -> list[tuple[str, str]]:
    os.environ["TRITON_INTERPRET"] = "1"
    [root] = importlib.util.find_spec("sglang").submodule_search_locations  # type: ignore[union-attr, misc]
    source = (Path(root) / "kernels" / "ops" / "memory" / "gpu_tensor_hash.py").read_text(encoding="utf-8")
    # Triton reads the source of its functions from a file
    file = Path(os.environ["SGLANG_HASH_FOLDER"]) / "gpu_tensor_hash_on_cpu.py"
    file.write_text(source.replace("assert t.is_cuda", "assert True").replace("assert tensor.is_cuda", "assert True"))
    spec = importlib.util.spec_from_file_location("gpu_tensor_hash_on_cpu", file)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    from sglang.srt.managers.mm_utils import tensor_hash

    return [(f"{tensor_hash(w):016x}", f"{module.gpu_tensor_hash(w, use_cg=False):016x}") for w in weights()]


if __name__ == "__main__":
    # before SGLang's kernels are imported
    found = hashes()
    bodies = [json.loads(line) for line in sys.stdin]
    for each in bodies:
        check(*each)
    print(json.dumps([len(bodies), found]))
