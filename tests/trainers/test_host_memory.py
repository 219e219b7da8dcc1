"""Memory that freed tensors leave behind, in a process of its own."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from agentfactory.trainers.processes.host_memory import return_freed_tensors, trim_heap

def used():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1024

if sys.argv[1] == "returned":
    return_freed_tensors()
torch.ones(6 * 2**20).sum()  # 24 MiB: from now on, glibc keeps pieces of this size in its heap
before, kept = used(), []
for index in range(20):
    large = torch.ones(6 * 2**20 + 1000 * index)
    kept.append(torch.ones(100_000))
    del large
tensors = [torch.ones(5 * 2**20) for _ in range(20)]
kept += tensors[::2]
del tensors
small = [torch.ones(2**18) for _ in range(200)]
kept += small[::20]
del small
if sys.argv[1] == "returned":
    trim_heap()
print((used() - before) / (sum(tensor.nbytes for tensor in kept) / 2**20))
"""


@pytest.mark.processes
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_tensors_leave_no_memory_behind() -> None:
    def ratio(how: str) -> float:
        done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
        return float(done.stdout)

    assert ratio("kept") > 1.5
    assert ratio("returned") < 1.1
