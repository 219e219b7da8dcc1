"""Tests of errors on a full disk: they name the file that did not fit, whatever the library's own error is."""

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from agentfactory.base.files.disk import DiskError, append, writing


def test_the_file_is_named() -> None:
    with pytest.raises(DiskError, match=r"^/dev/full cannot be written: No space left on device \(.*\); fix: "):
        append(Path("/dev/full"), "a line")


def test_a_library_in_rust_only_quotes_the_system(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"a\.bin cannot be written: No space left"), writing(tmp_path / "a.bin"):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    for error in (RuntimeError("a bug"), FileNotFoundError(errno.ENOENT, "No such file", "there")):
        for path in (tmp_path / "a.bin", tmp_path / "none" / "a.bin"):
            with pytest.raises(type(error)) as caught, writing(path):
                raise error
            assert caught.value is error


def test_a_folder_that_cannot_be_written_is_not_full() -> None:
    with pytest.raises(DiskError, match=r"^/proc/a cannot be written: .*; fix: choose a folder that can be written"):
        append(Path("/proc/a"), "a line")


@pytest.mark.extended
@pytest.mark.processes
def test_real_libraries_at_a_file_size_limit(tmp_path: Path) -> None:
    """Use the limit instead of a full disk, which only root can create."""
    code = f"""
import torch
from pathlib import Path
from safetensors.torch import save_file
from agentfactory.base.files.disk import DiskError, writing
state = {{"weight": torch.ones(1 << 16)}}
for save in (save_file, torch.save):
    file = Path({str(tmp_path)!r}) / save.__name__
    try:
        with writing(file):
            save(state, file)
    except DiskError as error:
        print(error)
"""
    limit = 1 << 15
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    for name in ("save_file", "save"):
        assert f"{tmp_path}/{name} cannot be written: File too large" in done.stdout, done.stderr
