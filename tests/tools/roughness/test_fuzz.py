"""A short run of the fuzzer: see fuzz.py."""

from tests.tools.roughness.fuzz import fuzz


async def test_mutants_work_or_are_named() -> None:
    fuzzer = await fuzz(seed=39, seconds=0, steps=40)
    assert not fuzzer.faults, "\n".join(fuzzer.faults[:3])
    assert sum(fuzzer.found.values()) == 80
