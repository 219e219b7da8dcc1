"""Measure the size of the code: `python benchmarks/house.py [--trace]`.

It counts the lines of Python of the core (without worlds, audit and viewer), of everything and of the tests, the files,
and the modules that loading a recipe imports. With `--trace` it also runs the quickstart and counts the files whose
functions it calls. The last line is JSON.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = "recipes/quickstart/quickstart.yaml"
EXTENSIONS = ("worlds", "audit", "viewer", "tinker", "people", "cluster")
LOADED = f"""
import sys
from agentfactory.recipe.load import load_recipe
load_recipe("{RECIPE}")
print(sum(name.startswith("agentfactory.") and hasattr(module, "__file__") and module.__file__ is not None
          for name, module in sys.modules.items()))
"""
TRACE = """
import atexit, json, os, sys
root, out = os.environ["TRACE_ROOT"] + "/agentfactory/", os.environ["TRACE_OUT"]
names, files, done = {}, {}, set()
def write(tag):
    if tag not in done:
        done.add(tag)
        with open(f"{out}/{os.getpid()}-{tag}.json", "w") as file:
            json.dump([*files], file)
def enter(frame, event, _):
    if event != "call":
        return
    code = frame.f_code
    if (name := names.get(code)) is None:
        path = code.co_filename
        # functions, and no class bodies or modules
        ours = path.startswith(root) and not code.co_name.startswith("<") and code.co_flags & 1
        step = path.endswith(("torch/optim/adamw.py", "torch/optim/adam.py")) and code.co_name == "step"
        name = names[code] = "step" if step else path[len(root):] if ours else ""
    if name == "step":
        write("step")
    elif name:
        files[name] = None
sys.setprofile(enter)
atexit.register(write, "exit")
"""
"""A sitecustomize.py: each process writes the files that it entered at its end, and the trainer also at its first
optimizer step."""


def sources(folder: str) -> list[str]:
    """Return the Python files of a folder that git tracks."""
    names = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in names.stdout.splitlines() if name.endswith(".py") and (ROOT / name).is_file()]


def lines(names: list[str]) -> int:
    """Return the number of lines of files."""
    return sum(len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in names)


def size() -> dict[str, int]:
    """Return the lines of the core, of everything and of the tests, and the number of files."""
    product = sources("agentfactory")
    core = [name for name in product if name.split("/")[1] not in EXTENSIONS]
    return {"core": lines(core), "all": lines(product), "files": len(product), "tests": lines(sources("tests"))}


def loaded() -> int:
    """Return how many of our modules loading a recipe imports."""
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def entered() -> dict[str, int]:
    """Return how many of our files the quickstart enters in all processes, and its trainer until the first step."""
    with tempfile.TemporaryDirectory() as folder:
        home, out = Path(folder, "home"), Path(folder, "out")
        home.mkdir()
        out.mkdir()
        (home / "sitecustomize.py").write_text(TRACE, encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": str(home), "TRACE_OUT": str(out), "TRACE_ROOT": str(ROOT)}
        run = f"output={folder}/run"
        command = [sys.executable, "-m", "agentfactory", "train", RECIPE, run]
        subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=sys.stderr)
        found = {path.stem: set(json.loads(path.read_text(encoding="utf-8"))) for path in out.glob("*.json")}
    steps = [files for name, files in found.items() if name.endswith("-step")]
    return {"run": len(set().union(*found.values())), "trainer_to_step": max(map(len, steps))}


def main() -> None:
    figures = size() | {"modules_to_load_a_recipe": loaded()}
    if "--trace" in sys.argv[1:]:
        figures |= entered()
    for name, figure in figures.items():
        print(f"{name:28}{figure:8,}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
