"""SGLang's own hashes of weights, on a CPU: its GPU kernel by Triton's interpreter. Run with SGLang's Python.

Prints JSON: one [hash on a CPU, hash on a GPU] for each of `weights()`.
"""

import importlib.util
import json
import os
from pathlib import Path

import torch


def weights() -> list[torch.Tensor]:
    """Weights of several dtypes and sizes: parts of a word, of a tile, several tiles."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(torch.float32, 5), (torch.bfloat16, 7), (torch.bfloat16, 8192 * 2), (torch.float32, 3 * 8192 + 11)]
    sizes += [(torch.uint8, 1), (torch.float32, 8192 * 3), (torch.bfloat16, 100_001)]
    return [torch.randint(0, 250, (n,), generator=generator).to(dtype) * 3 for dtype, n in sizes]


def main() -> None:
    """Print the hashes."""
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

    print(
        json.dumps([[f"{tensor_hash(w):016x}", f"{module.gpu_tensor_hash(w, use_cg=False):016x}"] for w in weights()])
    )


if __name__ == "__main__":
    main()
