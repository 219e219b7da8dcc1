"""tests/sglang_api.json is what SGLang's wheel says, at the version that docs/servers.md names."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.sglang_api import TABLE, load_table, read_api

VERSION = load_table()["version"]


def test_the_documented_version_is_that_of_the_table() -> None:
    assert f"SGLang {VERSION}" in (Path(__file__).parents[2] / "docs" / "servers.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_the_table_is_the_wheels(tmp_path: Path) -> None:
    """Downloads 39 MB. After a change: `python -m tests.sglang_api FOLDER` with the unpacked wheel."""
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", f"sglang=={VERSION}"]
    subprocess.run([*download, "--dest", str(tmp_path)], check=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "wheel")
    assert read_api(tmp_path / "wheel") == load_table(), f"{TABLE} is of another version"
