"""Prompts that cannot fit: refused before the first chain, with the number that they need."""

from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from tests.scripted_chains import scripted_chains


async def test_prompts_that_are_all_too_long_are_refused(tmp_path: Path) -> None:
    rollout = {"max_total_tokens": 40, "max_tokens": 8}
    problem = r"max_total_tokens: got 40, but the shortest prompt of data \(row 2\) has \d+ tokens; fix: raise it and"
    async with scripted_chains(tmp_path, [], rollout=rollout) as chains:
        with pytest.raises(SettingError, match=problem):
            await chains.runner.check([{"question": "go on and on"}, {"question": "go"}])


async def test_some_prompts_that_are_too_long_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": "word " * 10 * number} for number in range(1, 101)]
    async with scripted_chains(tmp_path, [], rollout={"max_total_tokens": 700, "max_tokens": 8}) as chains:
        await chains.runner.check(rows)
        renderer, specs = chains.runner.renderer, chains.runner.setup.specs
        counts = [len(renderer.open([{"role": "user", "content": row["question"]}], specs)) for row in rows]
    long = sum(count >= 700 for count in counts)
    assert 0 < long < 100
    said = f"about {long} of 100 rows of data have prompts of more tokens than rollout.max_total_tokens=700"
    assert said in caplog.text
    assert "such as row 100" in caplog.text
