"""The speed of sandboxes: a warm cell of the code interpreter, 16 new sandboxes, and a program in a new sandbox.

A warm cell is `CodeInterpreter.python` on a variable, in a sandbox that has run cells before. 16 sandboxes start
together, and are ready when each has executed a cell. A program is `run_script` of one line, run in sequence, and
compared with `python -I -S -c pass`, the minimum cost of a process. All results are medians. The last line is JSON:
`warm_cell_vs_limit` and `start_vs_limit` are shares of 2 ms and of 1 s.

    python benchmarks/sandbox.py [--quick]
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable

from agentfactory.base.processes.sandbox_limits import SandboxSettings
from agentfactory.tools.prebuilt.code_interpreter import CodeInterpreter
from agentfactory.tools.sandbox.interpreter import find_interpreter
from agentfactory.tools.sandbox.session import Sandbox, run_script

CELL_SECONDS, START_SECONDS, SANDBOXES = 0.002, 1.0, 16


async def median(action: Callable[[], Awaitable[object]], repetitions: int) -> float:
    """Return the median seconds of `action`, without its first run."""
    seconds = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        await action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


async def warm_cell(cells: int) -> float:
    """Return the seconds of one cell."""
    interpreter = CodeInterpreter()
    await interpreter.reset()
    await interpreter.python("x = 0")
    try:
        return await median(lambda: interpreter.python("x += 1\nx"), cells)
    finally:
        await interpreter.close()


async def start_together() -> None:
    """Start the sandboxes and let each execute a cell."""
    settings = SandboxSettings()
    starting = [Sandbox.begin(settings) for _ in range(SANDBOXES)]
    sandboxes = await asyncio.gather(*(Sandbox.ready(settings, start) for start in starting))
    results = await asyncio.gather(*(sandbox.run("6 * 7", 10.0) for sandbox in sandboxes))
    assert [result.text for result in results] == ["42"] * SANDBOXES
    for sandbox in sandboxes:
        sandbox.close()


async def measure(quick: bool) -> dict[str, float]:
    """Print all results, and return the ratios."""
    cell = await warm_cell(500 if quick else 5000)
    start = await median(start_together, 3 if quick else 15)
    script = await median(lambda: run_script("print(1)"), 5 if quick else 50)
    python = [str(find_interpreter(None).executable), "-I", "-S", "-c", "pass"]
    bare = await median(lambda: asyncio.to_thread(subprocess.run, python, check=True), 5 if quick else 50)
    print(f"warm cell {cell * 1e3:.3f} ms; {SANDBOXES} sandboxes ready in {start:.3f} s")
    print(f"a program in a fresh sandbox {script * 1e3:.1f} ms; a bare Python {bare * 1e3:.1f} ms")
    return {
        "warm_cell_vs_limit": round(cell / CELL_SECONDS, 3),
        "start_vs_limit": round(start / START_SECONDS, 3),
        "script_vs_bare_python": round(script / bare, 2),
    }


def main() -> None:
    """Run the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the repetitions")
    print(json.dumps(asyncio.run(measure(parser.parse_args().quick))))


if __name__ == "__main__":
    main()
