"""`python torchvision_for_cpu.py`: let the installed torchvision be imported beside a torch without CUDA.

vLLM imports it for models that see. What PyPI has is built for CUDA: its operators cannot be loaded here, and two of
them are described before it notices. Nothing that vLLM does with images needs them."""

from importlib.util import find_spec
from pathlib import Path

ADDED = """
# added by AgentFactory: the operators that are described although they cannot be loaded
if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

spec = find_spec("torchvision")
assert spec.origin is not None, "torchvision is not installed"
file = Path(spec.origin).with_name("extension.py")
if ADDED not in (source := file.read_text(encoding="utf-8")):
    file.write_text(source + ADDED, encoding="utf-8")
