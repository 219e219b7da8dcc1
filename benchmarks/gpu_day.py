"""Run everything that needs a GPU on a machine without a network, in nine minutes: the GPU tests, then fp8.py and
placement.py.

Such a machine has torch, transformers and other packages in its image. `pip freeze` there lists them. Here, download
what agentfactory needs beside them, for its Python and its CUDA:

    python benchmarks/gpu_day.py wheels FREEZE FOLDER [--python 3.12] [--cuda 130]

Copy the repository and FOLDER there, and run:

    python3 benchmarks/gpu_day.py run FOLDER OUTPUT [--minutes 9]

OUTPUT gets the logs. The last line is JSON: the device and the versions; `tests` with the number that passed, those
that failed, and the reasons for skips; the ratios of fp8.py and placement.py; the seconds of each part. A part that
exceeds its share of the time is ended and reports what it has, with `incomplete` as the reason. Without a GPU, the GPU
tests skip, and the benchmarks use a tiny network.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

REPOSITORY = Path(__file__).parents[1]
EXTRAS = ["liger-kernel", "bitsandbytes", "pytest-timeout", "pytest-xdist", "pytest-asyncio", "hypothesis"]
"""Packages that the GPU tests use beside agentfactory's requirements."""
SHARES = {"tests": 0.5, "fp8.py": 0.4, "placement.py": 1.0}
"""Part -> the share of the time that is left when it begins."""


def download(freeze: Path, folder: Path, python: str, cuda: str) -> None:
    """Download to `folder` the wheels of every requirement that is not in `freeze`; the versions in it stay."""
    installed = read_freeze(freeze)
    with tempfile.TemporaryDirectory() as temporary:
        wanted, known = Path(temporary) / "wanted.txt", Path(temporary) / "known.txt"
        wanted.write_text("\n".join([f"agentfactory-rl[fp8] @ file://{REPOSITORY}", *EXTRAS]))
        known.write_text("\n".join(f"{name}=={version}" for name, version in installed.items() if version))
        uv = [sys.executable, "-m", "uv", "pip", "compile", "--no-python-downloads", "--no-header", "--no-annotate"]
        target = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
        resolved = subprocess.run(
            [*uv, *target, "--override", known, wanted], check=True, stdout=subprocess.PIPE, text=True
        )
    missing = [line for line in resolved.stdout.splitlines() if "==" in line and _name(line) not in installed]
    # the image's torch has its CUDA, also where pip does not list it
    missing = [line for line in missing if not line.startswith(("nvidia-", "cuda-", "triton"))]
    platforms = [f"--platform=manylinux_2_{number}_x86_64" for number in (17, 24, 27, 28, 34)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    only = ["--only-binary=:all:", f"--python-version={python}", *platforms, "--platform=manylinux2014_x86_64"]
    subprocess.run([*pip, *only, f"--dest={folder}", *missing], check=True)
    for wheel in folder.glob("bitsandbytes-*.whl"):
        keep_cuda(wheel, cuda)
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{len(missing)} wheels, {size / 2**20:.0f} MiB: {', '.join(missing)}")


def read_freeze(freeze: Path) -> dict[str, str | None]:
    """Read the output of `pip freeze`: package -> version without its local part, which no index has, or None for a
    package that was installed from a file. Raises SystemExit if torch is not in it."""
    found: dict[str, str | None] = {}
    for line in freeze.read_text(encoding="utf-8").splitlines():
        if listed := re.match(r"([\w.-]+) ?(?:==([^\s+]+)|@ )", line.strip()):
            found[_name(listed[1])] = listed[2]
    if "torch" not in found:
        raise SystemExit(f"error: {freeze} lists no torch; fix: write it there with `python3 -m pip freeze`")
    return found


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[=\[ ;@]", requirement)[0]).lower()


def keep_cuda(wheel: Path, cuda: str) -> None:
    """Remove bitsandbytes' libraries for other GPUs from its wheel; they are nine tenths of it. Raises SystemExit if it
    has none for this CUDA."""
    with zipfile.ZipFile(wheel) as source:
        has = sorted({found for name in source.namelist() for found in re.findall(r"_cuda(\d+)\.so$", name)})
    if cuda not in has:
        raise SystemExit(f"error: --cuda: got {cuda}, and {wheel} has {', '.join(has)}; fix: use one, or delete it")
    ours = re.compile(rf"_(cpu|cuda{cuda})\.so")
    whole = wheel.rename(wheel.with_suffix(".whole"))
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.namelist():
            content = source.read(member)
            if member.endswith(".so") and not ours.search(member):
                continue
            if member.endswith("RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if ".so," not in line or ours.search(line)).encode()
            target.writestr(member, content)
    whole.unlink()


def run(wheels: Path, output: Path, minutes: float) -> dict[str, Any]:
    """Install the wheels into `output`, run the parts, and return the report."""
    if not wheels.is_dir():
        raise SystemExit(f"error: {wheels} is no folder; fix: copy the one that `wheels` has filled, or an empty one")
    started, site = time.monotonic(), output / "site"
    site.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    if found := sorted(wheels.glob("*.whl")):
        subprocess.run([*pip, f"--target={site}", *found], check=True)
    # agentfactory's own metadata, which the doctor reads
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "egg_info", f"--egg-base={site}"], cwd=REPOSITORY, check=True
    )
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (site, REPOSITORY)))
    report: dict[str, Any] = _describe() | {"seconds": {"install": round(time.monotonic() - started)}}
    for name, share in SHARES.items():
        began = time.monotonic()
        seconds = share * (60 * minutes - (began - started))
        report[name] = run_tests(output, seconds) if name == "tests" else run_benchmark(name, output, seconds)
        report["seconds"][name] = round(time.monotonic() - began)
    return report


def _describe() -> dict[str, Any]:
    said = subprocess.run([sys.executable, "-c", DESCRIBE], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return found


DESCRIBE = """
import importlib.metadata, json, platform, torch
gpu = torch.cuda.is_available()
versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate", "peft")}
device = torch.cuda.get_device_name() if gpu else "cpu"
print(json.dumps({"device": device, "python": platform.python_version(), "versions": versions}))
"""


def run_tests(output: Path, seconds: float) -> dict[str, Any]:
    """Run the GPU tests in four processes; those that print speeds come last, alone."""
    pytest = [sys.executable, "-m", "pytest", "-v", "-s", "-p", "no:cacheprovider", "--timeout=300"]
    files = sorted(map(str, (REPOSITORY / "tests" / "gpu").glob("gpu_*.py")))
    found: dict[str, Any] = {"passed": 0, "failed": [], "skipped": Counter()}
    until = time.monotonic() + seconds
    for name, chosen in (("tests", ["-k", "not speed", "-n", "4"]), ("speed", ["-k", "speed"])):
        left, junit = max(1, until - time.monotonic()), output / f"{name}.xml"
        # an earlier run's
        junit.unlink(missing_ok=True)
        command = [*pytest, f"--session-timeout={left:.0f}", f"--junitxml={junit}", *chosen, *files]
        # pytest ends by itself after a test; one that hangs ends here
        problem = _run(command, output / f"{name}.log", left + 30)
        if not junit.exists():
            found["incomplete"] = f"{problem or 'pytest wrote no report'}: see {name}.log"
            continue
        if "session-timeout" in (output / f"{name}.log").read_text(encoding="utf-8", errors="replace"):
            found["incomplete"] = f"ended after {left:.0f} s: see {name}.log"
        for case in ElementTree.parse(junit).iter("testcase"):
            if (skip := case.find("skipped")) is not None:
                found["skipped"][skip.get("message", "")] += 1
            elif case.find("failure") is not None or case.find("error") is not None:
                found["failed"].append(case.get("name"))
            else:
                found["passed"] += 1
    return found


def run_benchmark(name: str, output: Path, seconds: float) -> dict[str, Any]:
    """Run a benchmark for at most `seconds`. Returns its last JSON, with `incomplete` if it was ended or failed."""
    log = output / f"{name}.log"
    problem = _run([sys.executable, str(REPOSITORY / "benchmarks" / name), "--quick"], log, seconds)
    printed = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(printed[-1]) if printed else {}
    return found if problem is None else {**found, "incomplete": f"{problem}: see {log.name}"}


def _run(command: Sequence[str], log: Path, seconds: float) -> str | None:
    """Run a command, and end it and its descendants after `seconds`. Returns why it has no result, or None."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status = process.wait(max(1, seconds))
        except subprocess.TimeoutExpired:
            return f"ended after {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return None if status == 0 else f"ended with status {status}"


def main() -> None:
    """Download the wheels, or run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    wheels = commands.add_parser("wheels")
    wheels.add_argument("freeze", type=Path)
    wheels.add_argument("folder", type=Path)
    wheels.add_argument("--python", default="3.12")
    wheels.add_argument("--cuda", default="130", help="of bitsandbytes' libraries, such as 130 for 13.0")
    there = commands.add_parser("run")
    there.add_argument("folder", type=Path)
    there.add_argument("output", type=Path)
    there.add_argument("--minutes", type=float, default=9.0)
    options = parser.parse_args()
    try:
        if options.command == "wheels":
            download(options.freeze, options.folder, options.python, options.cuda)
        else:
            print(json.dumps(run(options.folder.resolve(), options.output.resolve(), options.minutes)))
    except subprocess.CalledProcessError as error:
        # its own message is above
        sys.exit(f"error: status {error.returncode} of {' '.join(map(str, error.cmd[:6]))} ...")
    except OSError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
