"""Run everything that needs a GPU on a machine without a network, knowledge first, in parts of at most three minutes.

Such a machine has torch, transformers and other packages in its image. `pip freeze` there lists them. Here, download
what agentfactory and vLLM need beside them, for its Python and its CUDA:

    python benchmarks/gpu_day.py wheels FREEZE FOLDER [--python 3.12] [--cuda 130] [--vllm 0.32.0]

FOLDER gets agentfactory's wheels, and vLLM in pieces, vllm-1-of-4 and so on: of its wheel only the Python files, the
common kernels, the allocator of its sleep mode and FlashAttention 3 (no mixture of experts, no FlashAttention 2), and
the small packages that it imports. `gpu_day.py pack NAME PATH FOLDER` cuts any other folder into such pieces: NAME is
`model` for the curve. Copy the repository and FOLDER there, all at once or a piece per call, and run:

    python3 benchmarks/gpu_day.py run FOLDER OUTPUT [--parts NAME,...] [--minutes 9]

Each part is a process of its own, and keeps what it has found in OUTPUT/PART.json after each finding. A part that
exceeds its time is ended and keeps that, with `incomplete` as the reason. A later call skips finished parts and resumes
incomplete ones where it can, on the same machine or with FOLDER/PART.json of an earlier call. A line of JSON is printed
as each part ends; the last one names the parts that are left. On a machine without a GPU, every part runs on a tiny
network, with `rehearsal` in its JSON. AGENTFACTORY_VLLM_PYTHON names the Python of an environment with vLLM; without
it, vLLM comes from the pieces.

A machine that is lent for fifteen minutes, takes 64 MiB per call, and keeps ignored paths while it is warm, takes three
calls that follow each other. The repository's own files are 10 MiB of each. FOLDER is .day in the repository, in
.git/info/exclude; OUTPUT is /tmp/day. Each call ends with `tar czf $OUT/day.tgz -C /tmp/day --exclude data --exclude
site .`, and begins with `mkdir -p .day`:

1. carries .day/wheels and .day/vllm-1-of-4: --minutes 4 --parts race,leak,sdpa,update-0.5b
2. carries .day/vllm-2-of-4: --minutes 3 --parts fp8-0.5b,update-1.5b
3. carries .day/vllm-3-of-4 and .day/vllm-4-of-4: --minutes 6 --parts
   vllm-imports,vllm-full,vllm-adapters,vllm-time-share,curve

A model for the curve comes in calls before the third, each with a piece and `--minutes 0`; FOLDER/PART.json, from
OUTPUT of a machine that has gone, goes with any call.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
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
PARTS = {
    **{"race": 60, "leak": 60, "sdpa": 90, "vllm-imports": 180},
    **{"update-0.5b": 180, "vllm-full": 180, "vllm-adapters": 180, "vllm-time-share": 180},
    **{"fp8-0.5b": 180, "update-1.5b": 180, "fp8-1.5b": 180, "vllm-contract": 180, "tests": 180, "placement.py": 180},
    "curve": 180,
}
"""Part -> its most seconds, in the order in which they are run: what is known least, or decides most, comes first."""
LEAST_SECONDS = 20
"""No part begins with less."""
PIECE_MIB = 30
KEPT = r"vllm/.*\.(py|json)|vllm/(_C_stable_libtorch|cumem_allocator|spinloop|fs_io_C|.*fa3_C)\..*so|[^/]*dist-info/.*"
"""Members of vLLM's wheel that are carried."""
LEFT = re.compile(r"vllm/(third_party/(fmha_sm100|deep_gemm)|model_executor/layers/fused_moe/configs)/")
OMITTED = re.compile(
    r"torch|nvidia-|flashinfer|tilelang|nvtx|quack|tokenspeed|humming|fastsafe|instant|pynvvideo|opencv|opentelemetry|"
    r"anthropic|lm-format|outlines|numba|pycountry",
    re.IGNORECASE,
)
"""Requirements of vLLM that the image has at other versions, or that nothing here enters."""


def download(freeze: Path, folder: Path, python: str, cuda: str, vllm: str) -> None:
    """Download to `folder` the wheels of every requirement that is not in `freeze`; the versions in it stay. Write
    vLLM's pieces, unless they are there."""
    base = folder / "wheels"
    fetch([f"agentfactory-rl[fp8] @ file://{REPOSITORY}", *EXTRAS], freeze, base, python)
    for wheel in base.glob("bitsandbytes-*.whl"):
        keep_cuda(wheel, cuda)
    if not vllm or [*folder.glob("vllm-*-of-*")]:
        return
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / "vllm"
        fetch([f"vllm=={vllm}"], freeze, Path(temporary), python)
        [wheel] = Path(temporary).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if re.fullmatch(KEPT, member) and not LEFT.match(member):
                    archive.extract(member, made / "code")
        wheel.unlink()
        [about] = made.glob("code/*.dist-info/METADATA")
        needs = re.findall(r"^Requires-Dist: (.*)$", about.read_text(encoding="utf-8"), re.MULTILINE)
        needs = [re.sub(r"\[.*?\]", "", need) for need in needs if "extra ==" not in need and not OMITTED.match(need)]
        fetch(needs, freeze, made / "wheels", python, OMITTED)
        for wheel in base.glob("*.whl"):
            (made / "wheels" / wheel.name).unlink(missing_ok=True)
        brought = [*base.glob("*.whl"), *made.glob("wheels/*.whl")]
        known = [*read_freeze(freeze), *(_name(wheel.name.split("-")[0]) for wheel in brought)]
        (made / "packages.json").write_text(json.dumps({"python": python, "there": sorted(set(known))}))
        pack("vllm", made, folder)


def fetch(wanted: list[str], freeze: Path, folder: Path, python: str, omitted: re.Pattern[str] | None = None) -> None:
    """Download wheels of requirements, and of all that they require, except what is in `freeze` or `omitted`. A single
    requirement comes alone."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = wanted if len(wanted) == 1 else resolve(wanted, read_freeze(freeze), python)
    missing = [line for line in missing if omitted is None or not omitted.match(line)]
    platforms = [f"--platform=manylinux_2_{number}_x86_64" for number in (17, 24, 27, 28, 31, 34)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    only = ["--only-binary=:all:", f"--python-version={python}", *platforms, "--platform=manylinux2014_x86_64"]
    subprocess.run([*pip, *only, f"--dest={folder}", *missing], check=True)
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{len(missing)} wheels, {size / 2**20:.0f} MiB: {', '.join(missing)}")


def resolve(wanted: list[str], installed: dict[str, str | None], python: str) -> list[str]:
    """Return what is needed beside what is installed, at versions that agree with it."""
    with tempfile.TemporaryDirectory() as temporary:
        listed, known = Path(temporary) / "wanted.txt", Path(temporary) / "known.txt"
        listed.write_text("\n".join(wanted))
        known.write_text("\n".join(f"{name}=={version}" for name, version in installed.items() if version))
        uv = [sys.executable, "-m", "uv", "pip", "compile", "--no-python-downloads", "--no-header", "--no-annotate"]
        target = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
        resolved = subprocess.run(
            [*uv, *target, "--override", known, listed], check=True, stdout=subprocess.PIPE, text=True
        )
    missing = [line for line in resolved.stdout.splitlines() if "==" in line and _name(line) not in installed]
    # the image's torch has its CUDA, also where pip does not list it
    return [line for line in missing if not line.startswith(("nvidia-", "cuda-", "triton"))]


def pack(name: str, path: Path, folder: Path) -> None:
    """Write a folder to `folder` as pieces of one archive, called NAME-1-of-4 and so on."""
    with tempfile.TemporaryFile() as whole:
        with tarfile.open(fileobj=whole, mode="w:xz", preset=3) as archive:
            archive.add(path, ".")
        most, size = int(PIECE_MIB * 2**20), whole.tell()
        count = -(-size // most)
        whole.seek(0)
        for number in range(1, count + 1):
            (folder / f"{name}-{number}-of-{count}").write_bytes(whole.read(most))
    print(f"{name}: {size / 2**20:.0f} MiB in {count} pieces")


def unpack(folder: Path, data: Path) -> None:
    """Move the pieces in `folder` to `data`, where they outlast a call that brings others, and extract each archive of
    which all pieces have come."""
    data.mkdir(parents=True, exist_ok=True)
    for piece in sorted(folder.glob("*-of-*")):
        shutil.copy(piece, data)
    for first in sorted(data.glob("*-1-of-*")):
        name, count = re.fullmatch(r"(.+)-1-of-(\d+)", first.name).groups()  # type: ignore[union-attr]
        pieces = [data / f"{name}-{number}-of-{count}" for number in range(1, int(count) + 1)]
        if (data / name).exists() or not all(piece.exists() for piece in pieces):
            continue
        with tempfile.TemporaryFile() as whole:
            for piece in pieces:
                with piece.open("rb") as file:
                    shutil.copyfileobj(file, whole)
            whole.seek(0)
            with tarfile.open(fileobj=whole, mode="r:xz") as archive:
                archive.extractall(data / f".{name}", filter="data")
        (data / f".{name}").rename(data / name)


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


def run(folder: Path, output: Path, minutes: float, names: Sequence[str] = tuple(PARTS)) -> dict[str, Any]:
    """Install what `folder` has, run the parts that are not finished, and return which of `names` are, and which are
    left."""
    until = time.monotonic() + 60 * minutes
    if not folder.is_dir():
        raise SystemExit(f"error: {folder} is no folder; fix: copy the one that `wheels` has filled, or an empty one")
    install(folder, output)
    for name in names:
        record = output / f"{name}.json"
        if is_finished(record):
            continue
        if (seconds := min(PARTS[name], until - time.monotonic())) < LEAST_SECONDS:
            break
        print(json.dumps(run_part(name, output, seconds)), flush=True)
    ended = [name for name in names if is_finished(output / f"{name}.json")]
    return {"finished": ended, "left": [name for name in names if name not in ended]}


def is_finished(record: Path) -> bool:
    """Return whether a part has reached its last line."""
    return record.exists() and json.loads(record.read_text(encoding="utf-8")).get("finished") is True


def install(folder: Path, output: Path) -> None:
    """Install the wheels into `output`, once, and make all that has come importable."""
    site, data = output / "site", output / "data"
    output.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("*.json"):
        if not (output / earlier.name).exists():
            shutil.copy(earlier, output)
    if not site.exists():
        passing = output / ".site"
        passing.mkdir(exist_ok=True)
        install_wheels(folder / "wheels", passing)
        # agentfactory's own metadata, which the doctor reads, and vLLM for its plugin
        egg = [sys.executable, "setup.py", "--quiet", "egg_info", f"--egg-base={passing}"]
        subprocess.run(egg, cwd=REPOSITORY, check=True)
        passing.rename(site)
    unpack(folder, data)
    paths, vllm, python = [site, REPOSITORY], data / "vllm", ".".join(map(str, sys.version_info[:2]))
    # on another Python, vLLM is rehearsed with stubs alone
    if vllm.exists() and json.loads((vllm / "packages.json").read_text(encoding="utf-8"))["python"] == python:
        if not (vllm / "site").exists():
            install_wheels(vllm / "wheels", vllm / "site")
        paths += [vllm / "code", vllm / "site"]
    # threads that wait for others would spin on a busy machine
    os.environ |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_WAIT_POLICY": "passive"}


def install_wheels(wheels: Path, site: Path) -> None:
    """Install all wheels of a folder into `site`, if there are any."""
    if found := sorted(wheels.glob("*.whl")):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--upgrade", f"--target={site}", *found], check=True)


def run_part(name: str, output: Path, seconds: float) -> dict[str, Any]:
    """Run a part for at most `seconds`. Returns its JSON, which is in its file, too."""
    began, record = time.monotonic(), output / f"{name}.json"
    if name in TESTS or name.endswith(".py"):
        found: dict[str, Any] = {"part": name, "rehearsal": shutil.which("nvidia-smi") is None}
        found["found"] = (run_tests if name in TESTS else run_benchmark)(name, output, seconds)
    else:
        log = output / f"{name}.log"
        problem = _run([sys.executable, "-m", "benchmarks.gpu_parts", name, str(output)], log, seconds)
        found = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {"part": name, "found": {}}
        found |= {} if problem is None else {"incomplete": problem, "log": _last(log)}
    incomplete = found["incomplete"] if "incomplete" in found else found["found"].pop("incomplete", None)
    found |= {"finished": incomplete is None, "seconds": round(time.monotonic() - began, 1)}
    found |= {} if incomplete is None else {"incomplete": incomplete}
    record.write_text(json.dumps(found), encoding="utf-8")
    return found


def _last(log: Path) -> str:
    """Return the end of a log: nobody may be there to open it."""
    return log.read_text(encoding="utf-8", errors="replace")[-1200:]


TESTS = {
    # in four processes; those that print speeds come last, alone
    "tests": ("gpu/gpu_*.py", {"tests": ["-k", "not speed", "-n", "4"], "speed": ["-k", "speed"]}),
    # vLLM samples on a GPU by its second model runner, which no test on a CPU enters
    "vllm-contract": ("rollout/test_server_contract.py", {"vllm-contract": ["-k", "vllm", "-m", "not long"]}),
}
"""Part -> files in tests, and pytest's arguments of each of its runs."""


def run_tests(part: str, output: Path, seconds: float) -> dict[str, Any]:
    """Run tests, and return how many passed, the failed ones, and the reasons for skips."""
    # vLLM from the pieces is on this Python's path
    vllm = f"AGENTFACTORY_VLLM_PYTHON={os.environ.get('AGENTFACTORY_VLLM_PYTHON', sys.executable)}"
    pytest = ["env", vllm, sys.executable, "-m", "pytest", "-v", "-s", "-p", "no:cacheprovider", "--timeout=300"]
    pattern, runs = TESTS[part]
    files = sorted(map(str, (REPOSITORY / "tests").glob(pattern)))
    found: dict[str, Any] = {"passed": 0, "failed": [], "skipped": Counter()}
    until = time.monotonic() + seconds
    for name, chosen in runs.items():
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


def _parts(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(PARTS)}")
    return names


def main() -> None:
    """Download and pack what the machine lacks, or run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    wheels = commands.add_parser("wheels")
    wheels.add_argument("freeze", type=Path)
    wheels.add_argument("folder", type=Path)
    wheels.add_argument("--python", default="3.12")
    wheels.add_argument("--cuda", default="130", help="of bitsandbytes' libraries, such as 130 for 13.0")
    wheels.add_argument("--vllm", default="0.32.0", help='its version; "" for none')
    pieces = commands.add_parser("pack")
    pieces.add_argument("name")
    pieces.add_argument("path", type=Path)
    pieces.add_argument("folder", type=Path)
    there = commands.add_parser("run")
    there.add_argument("folder", type=Path)
    there.add_argument("output", type=Path)
    there.add_argument("--minutes", type=float, default=9.0)
    there.add_argument("--parts", type=_parts, default=[*PARTS], metavar="NAME,...", help=", ".join(PARTS))
    options = parser.parse_args()
    try:
        if options.command == "wheels":
            download(options.freeze, options.folder, options.python, options.cuda, options.vllm)
        elif options.command == "pack":
            pack(options.name, options.path, options.folder)
        else:
            folders = options.folder.resolve(), options.output.resolve()
            print(json.dumps(run(*folders, options.minutes, options.parts)))
    except subprocess.CalledProcessError as error:
        # its own message is above
        sys.exit(f"error: status {error.returncode} of {' '.join(map(str, error.cmd[:6]))} ...")
    except OSError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
