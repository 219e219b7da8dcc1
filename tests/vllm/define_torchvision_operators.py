"""`python define_torchvision_operators.py`: let this Python import torchvision without its compiled part.

PyPI's builds of torchvision are for CUDA, and their compiled part does not load beside a torch for CPUs. Processors of
images need none of its operators, but importing torchvision fails where they are not even defined.
"""

import importlib.util
from pathlib import Path

DEFINITIONS = """

if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

spec = importlib.util.find_spec("torchvision")
assert spec is not None
assert spec.origin is not None
module = Path(spec.origin).with_name("extension.py")
code = module.read_text(encoding="utf-8")
if not code.endswith(DEFINITIONS):
    module.write_text(code + DEFINITIONS, encoding="utf-8")
