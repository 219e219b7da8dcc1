"""A short run of the fuzzer: see fuzz.py."""

from pathlib import Path

import pytest

from tests.data_corpus.fuzz import fuzz


@pytest.mark.extended
def test_mutants_are_trained_as_they_are_or_named(tmp_path: Path) -> None:
    fuzzer = fuzz(seed=39, seconds=0, folder=tmp_path / "data", steps=400)
    assert not fuzzer.faults, "\n".join(fuzzer.faults[:3])
    assert sum(fuzzer.found.values()) == 400
    trained = sum(count for outcome, count in fuzzer.found.items() if "trained: " in outcome)
    assert trained > 50, fuzzer.found
