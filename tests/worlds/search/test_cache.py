"""The disk cache and the budget: concurrent processes, expiry, size, faults."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.worlds.browse.answer_cache import DiskCache
from agentfactory.worlds.search.engine import Budget


class Maker:
    def __init__(self, value: Any = "made") -> None:
        self.value, self.made = value, 0

    async def __call__(self) -> Any:
        self.made += 1
        await asyncio.sleep(0)
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


async def test_a_value_is_made_once(tmp_path: Path) -> None:
    cache, make = DiskCache(tmp_path), Maker({"a": ["ø", 1.5, None]})
    assert await asyncio.gather(*(cache.get(["k", 1], make) for _ in range(5))) == [make.value] * 5
    assert await cache.get(["k", 1], make) == make.value
    assert (make.made, cache.hits, cache.misses) == (1, 5, 1)
    await cache.get(["k", 2], make)
    assert make.made == 2
    await cache.close()


async def test_what_fails_is_not_kept(tmp_path: Path) -> None:
    cache, make = DiskCache(tmp_path), Maker(ToolInfrastructureError("down"))
    for result in await asyncio.gather(*(cache.get("k", make) for _ in range(3)), return_exceptions=True):
        assert isinstance(result, ToolInfrastructureError)
    assert make.made == 1
    make.value = "up"
    assert await cache.get("k", make) == "up"
    await cache.close()


async def test_entries_expire(tmp_path: Path) -> None:
    cache, make = DiskCache(tmp_path), Maker()
    await cache.get("k", make)
    await cache.close()
    for seconds, made in ((3600.0, 1), (0.0, 2)):
        cache = DiskCache(tmp_path, seconds=seconds)
        await cache.get("k", make)
        assert make.made == made
        await cache.close()


async def test_the_oldest_entries_make_room(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, max_bytes=20_000)
    for number in range(400):  # some 110 bytes each when compressed
        await cache.get(number, Maker(f"{number} {hash(str(number)) ** 5} {hash(str(-number)) ** 5}"))
    with cache._database.reading() as connection:
        size, total = connection.execute("SELECT SUM(LENGTH(value)), MAX(bytes) FROM entries, total").fetchone()
    assert 15_000 < size == total <= 20_000
    last, first = Maker(), Maker()
    await cache.get(399, last)
    await cache.get(0, first)
    assert (last.made, first.made) == (0, 1)
    await cache.close()


async def test_a_broken_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "cache.sqlite").write_bytes(b"this is no database, but it is long enough to be read as one" * 50)
    told = r"cache: .*cache\.sqlite cannot be used: file is not a database; fix: name another folder, or remove it"
    with pytest.raises(SettingError, match=told):
        DiskCache(tmp_path)
    for folder in (tmp_path / "cache.sqlite", tmp_path / "cache.sqlite" / "below", Path("/proc/none")):
        with pytest.raises(SettingError, match=r"cannot be used: .*; fix: name another folder"):
            DiskCache(folder)


PROCESS = """
import asyncio, sys
from pathlib import Path
from agentfactory.worlds.search.engine import Budget, BudgetUsedUp
from agentfactory.worlds.browse.answer_cache import DiskCache

async def main(folder, name):
    print("ready", flush=True)
    sys.stdin.readline()
    cache, budget, spent = DiskCache(folder), Budget(folder, "engine", calls=100, price=0.01), 0
    async def make():
        return name
    for number in range(200):
        await cache.get(number, make)
        try:
            budget.spend()
            spent += 1
        except BudgetUsedUp:
            pass
    print(spent, cache.hits, cache.misses, flush=True)
    await cache.close()

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


@pytest.mark.processes
def test_several_processes_share_cache_and_budget(tmp_path: Path) -> None:
    folder = tmp_path / "cache"  # which all processes create at the same time
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, folder, f"{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 4
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    spent, hits, misses = (sum(int(answer[0].split()[place]) for answer in answers) for place in range(3))
    assert spent == 100
    assert hits + misses == 800
    assert hits > 0
    budget = Budget(folder, "engine", calls=100)
    assert (budget.spent().calls, round(budget.spent().cost, 6)) == (100, 1.0)
    budget.close()
