"""benchmarks/gpu_day.py: what it reads of an image's packages, and what it reports of parts that are ended or fail."""

import json
import random
import zipfile
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu_day
from tests.waiting import wait_for


def test_a_freeze_is_read_with_packages_from_files_and_local_versions(tmp_path: Path) -> None:
    freeze = tmp_path / "freeze.txt"
    freeze.write_text("# an image\ntorch==2.11.0+cu130\nnvidia_dali @ file:///a.whl\nzope.interface==7.0\n-e /x\n")
    assert gpu_day.read_freeze(freeze) == {"torch": "2.11.0", "nvidia-dali": None, "zope-interface": "7.0"}
    freeze.write_text("Package Version\n------- -------\ntorch 2.11.0\n")
    with pytest.raises(SystemExit, match=r"freeze\.txt lists no torch; fix: write it there with `python3 -m pip fr"):
        gpu_day.read_freeze(freeze)


def test_a_wheel_keeps_the_libraries_of_one_cuda(tmp_path: Path) -> None:
    wheel = tmp_path / "bitsandbytes-1-py3-none-any.whl"
    names = [f"bitsandbytes/lib_{kind}.so" for kind in ("cpu", "cuda128", "cuda130")]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
        archive.writestr("bitsandbytes.dist-info/RECORD", "".join(f"{name},sha256=x,1\n" for name in names))
    with pytest.raises(SystemExit, match=r"--cuda: got 131, and .* has 128, 130; fix"):
        gpu_day.keep_cuda(wheel, "131")
    gpu_day.keep_cuda(wheel, "130")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.namelist() == [names[0], names[2], "bitsandbytes.dist-info/RECORD"]
        assert archive.read("bitsandbytes.dist-info/RECORD").decode().split() == [
            f"{name},sha256=x,1" for name in (names[0], names[2])
        ]
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


def test_a_folder_of_wheels_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="wheels is no folder; fix: copy"):
        gpu_day.run(tmp_path / "wheels", tmp_path / "output", 9)
    assert not (tmp_path / "output").exists()


def test_pieces_are_joined_when_all_have_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day, "PIECE_MIB", 0.001)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "weights").write_bytes(content := random.Random(0).randbytes(3000))
    gpu_day.pack("model", tmp_path / "made", tmp_path)
    for piece in sorted(tmp_path.glob("model-*")):
        assert not (tmp_path / "data" / "model").exists()
        (call := tmp_path / f"call-{piece.name}").mkdir()
        piece.rename(call / piece.name)
        gpu_day.unpack(call, tmp_path / "data")
    assert (tmp_path / "data" / "model" / "weights").read_bytes() == content


@pytest.mark.processes
def test_a_later_call_does_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day, "REPOSITORY", tmp_path)
    monkeypatch.setattr(gpu_day, "install", lambda *_: None)
    (parts := tmp_path / "benchmarks" / "gpu_parts").mkdir(parents=True)
    (parts / "__init__.py").touch()
    script = "import sys, pathlib; pathlib.Path('race.json').write_text({!r}); sys.exit({!r})"
    for told, left in (("no vLLM yet", ["race"]), (0, []), ("is not run again", [])):
        content = json.dumps({"found": {"told": told}, "finished": told == 0})
        (parts / "__main__.py").write_text(script.format(content, told))
        assert gpu_day.run(tmp_path, tmp_path, 1, ["race"])["left"] == left
        record = json.loads((tmp_path / "race.json").read_text())
        assert record.get("log") == ("no vLLM yet\n" if left else None)
    assert record["found"] == {"told": 0}


@pytest.mark.processes
def test_an_ended_part_tells_what_it_has_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day, "REPOSITORY", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    script = tmp_path / "benchmarks" / "slow.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('{\"ratio\": 1.5}', flush=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    found = gpu_day.run_benchmark("slow.py", tmp_path, 1)
    assert found == {"ratio": 1.5, "incomplete": "ended after 1 s: see slow.py.log"}
    child = int((tmp_path / "slow.py.log").read_text().splitlines()[1])
    # its new parent reaps it, if that does
    wait_for(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)
    script.write_text("raise ValueError('no GPU')\n")
    assert gpu_day.run_benchmark("slow.py", tmp_path, 60) == {"incomplete": "ended with status 1: see slow.py.log"}
    assert "ValueError: no GPU" in (tmp_path / "slow.py.log").read_text()
