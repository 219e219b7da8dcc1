"""AgentFactory as a wheel in an environment of its own, with no checkout in sight. `make test-wheel` runs it, and makes
vLLM's environment before."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from agentfactory.base.user_code.extras import DISTRIBUTION
from tests.conftest import REPOSITORY

VLLM_PYTHON = os.environ.get("AGENTFACTORY_VLLM_PYTHON")


def tracked(*places: str) -> list[Path]:
    out = subprocess.run(["git", "ls-files", "-z", *places], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [path for name in out.stdout.split("\0")[:-1] if (path := Path(name)).is_symlink() or path.exists()]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, and that from the tracked files: what else lies about here is in neither."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for path in tracked():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / path, source / path, follow_symlinks=False)
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(built), str(source)], check=True)
    return next(built.glob("*.whl"))


@pytest.fixture(scope="session")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a new environment with the wheel and what it asks for."""
    folder = make_environment(tmp_path_factory.mktemp("environment") / "venv")
    # as the Makefile does: a build of torch that only pip finds, and uv for the rest
    (torch,) = (line for line in requires(DISTRIBUTION) or [] if Requirement(line).name == "torch")
    pip(folder, "--no-compile", torch)
    install(folder, str(wheel))
    return folder


def install(programs: Path, package: str) -> None:
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv), "pip", "install", "--quiet", "--python", str(programs / "python"), package]
    subprocess.run(command, check=True)


def make_environment(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    return folder / "bin"


def pip(programs: Path, *arguments: str) -> None:
    command = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *arguments], check=True)


@pytest.fixture(scope="session")
def place(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    run(folder, programs / "agentfactory", "new", "word_problems")
    print(run(folder, programs / "agentfactory", "train", "word_problems/tiny/recipe.yaml"))
    return folder


def environment(**more: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **more}


def run(folder: Path, program: Path, *arguments: str, **more: str) -> str:
    command = [str(program), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment(**more), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def summary(folder: Path) -> dict[str, float]:
    return json.loads((folder / "summary.json").read_text())


def test_its_one_name_is_agentfactory(wheel: Path) -> None:
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"agentfactory"}


def test_every_file_is_in_it(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {str(path) for path in tracked("agentfactory") if not (REPOSITORY / path).is_symlink()}
    assert held == wanted | {f"agentfactory/{path}" for path in tracked("recipes")}


def test_nothing_comes_from_the_checkout(programs: Path, tmp_path: Path) -> None:
    code = "import agentfactory, sys; print(agentfactory.__file__, *sys.path, sep='\\n')"
    said = run(tmp_path, programs / "python", "-c", code)
    assert said.startswith(str(programs.parent))
    assert str(REPOSITORY) not in said.splitlines()


def test_a_new_task_learns(place: Path) -> None:
    after = summary(place / "runs" / "word_problems-tiny")
    assert after["success_before"] <= 0.5
    assert after["success_after"] >= 0.85


def test_a_new_task_with_images_is_written_whole(programs: Path, tmp_path: Path) -> None:
    run(tmp_path, programs / "agentfactory", "new", "cloths", "--vision")
    assert "all right" in run(tmp_path, programs / "agentfactory", "tools", "check", "cloths/recipe.yaml")
    assert (tmp_path / "cloths" / "tiny" / "seeing_model.py").is_file()


def test_without_extras_their_features_name_them(programs: Path, place: Path) -> None:
    # training needs none; it says what it leaves out
    assert not (place / "runs" / "word_problems-tiny" / "curve.png").exists()
    (place / "texts.jsonl").write_text('{"id": "a", "text": "b"}\n')
    (place / "browse.yaml").write_text(
        (place / "word_problems" / "recipe.yaml").read_text() + "mcp_servers: {b: {module: browse}}\n"
    )
    refused = {
        "viewer": ["view", "runs/word_problems-tiny"],
        "search": ["index", "build", "texts.jsonl", "--output", "index"],
        "browse": ["tools", "check", "word_problems/browse.yaml"],
        "rewards": ["tools", "check", "word_problems/recipe.yaml", "rewards=[math_equal]"],
        "webshop": ["tools", "check", "word_problems/recipe.yaml", "tools=[webshop]"],
    }
    (place / "browse.yaml").rename(place / "word_problems" / "browse.yaml")
    for extra, arguments in refused.items():
        command = [str(programs / "agentfactory"), *arguments]
        done = subprocess.run(command, cwd=place, env=environment(), capture_output=True, text=True)
        assert done.returncode in (1, 2), done
        assert f"fix: pip install 'agentfactory-rl[{extra}]'" in done.stderr, done
        assert "Traceback" not in done.stderr


def test_a_run_is_evaluated_and_viewed(wheel: Path, programs: Path, place: Path) -> None:
    run(place, programs / "agentfactory", "eval", "runs/word_problems-tiny/recipe.yaml", "data.limit=8")
    page = place / "page.html"
    install(programs, f"{wheel}[viewer]")
    run(place, programs / "agentfactory", "view", "runs/word_problems-tiny", "--export", str(page))
    assert "plotly" in page.read_text(encoding="utf-8").lower()
    run(place, programs / "python", "-m", "agentfactory", "tools", "check", "word_problems/recipe.yaml")


@contextmanager
def serving(programs: Path, folder: Path, recipe: str, *overrides: str) -> Iterator[str]:
    command = [str(programs / "agentfactory"), "serve", recipe, *overrides]
    with subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True) as server:
        try:
            url = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
            yield url.rstrip(";,.")
        finally:
            server.terminate()


def test_it_is_launched_by_hand(programs: Path, place: Path) -> None:
    recipe = "runs/word_problems-tiny/grpo/recipe.yaml"
    settings = ["output=by_hand", "train.steps=2", "train.warmup_steps=0", "eval.data=null"]
    settings += ["train.processes=2", "train.strategy=ddp"]
    with serving(programs, place, recipe, "output=served") as url:
        flags = ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0", "-m", "agentfactory.train"]
        command = ["launch", *flags, recipe, *settings, f"server.url={url}"]
        run(place, programs / "accelerate", *command, ACCELERATE_USE_CPU="true")
    assert summary(place / "by_hand")["steps"] == 2


def test_its_recipes_run_from_any_folder(programs: Path, tmp_path: Path) -> None:
    """The quickstart's, with the configurations of accelerate that come with it."""
    settings = ["sft.train.steps=30", "grpo.train.steps=1", "grpo.train.warmup_steps=0", "grpo.eval.data=null"]
    settings += ["train.processes=2", "train.strategy=fsdp2"]
    run(tmp_path, programs / "agentfactory", "train", "recipes/quickstart/quickstart.yaml", *settings)
    assert summary(tmp_path / "runs" / "quickstart")["status"] == "completed"
    run(tmp_path, programs / "agentfactory", "train", "recipes/gsm8k/3b-lora-24gb.yaml", "--dry-run")


@pytest.mark.skipif(VLLM_PYTHON is None, reason="AGENTFACTORY_VLLM_PYTHON names no Python with vLLM: make test-wheel")
def test_vllm_finds_its_plugin_in_its_own_environment(wheel: Path, programs: Path, place: Path, tmp_path: Path) -> None:
    """vLLM's environment with the wheel in place of the checkout; full weights go by the plugin."""
    assert VLLM_PYTHON is not None
    own = make_environment(tmp_path / "vllm")
    find = "import site; print(site.getsitepackages()[0])"
    theirs, packages = (run(tmp_path, Path(python), "-c", find).strip() for python in (VLLM_PYTHON, own / "python"))
    # a folder that a .pth file adds is searched for packages, and its own .pth files, such as the checkout's, are not
    Path(packages, "vllm.pth").write_text(theirs)
    pip(own, "--no-deps", "--force-reinstall", str(wheel))
    recipe = "runs/word_problems-tiny/grpo/recipe.yaml"
    settings = ["output=by_vllm", "train.steps=2", "train.warmup_steps=0", "eval.data=null", "server.engine=vllm"]
    settings += [f"server.options.python={own / 'python'}"]
    run(place, programs / "agentfactory", "train", recipe, *settings, VLLM_CPU_KVCACHE_SPACE="1")
    assert summary(place / "by_vllm")["steps"] == 2
