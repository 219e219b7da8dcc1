"""The most memory that tensors took while a test watched them."""

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile


class Allocations:
    """The allocations of tensors in a block."""

    peak: int
    """The most bytes that tensors had at a time, beyond those that were there before; set at the end of the block."""


@contextmanager
def allocations() -> Iterator[Allocations]:
    """Watch the tensors of a block."""
    # else tensors that an earlier profile of this process has seen, in cycles, would be given back in this one
    gc.collect()
    found = Allocations()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        yield found
    events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    # positive where memory is taken, negative where it is given back
    found.peak = max(itertools.accumulate(event.nbytes() for event in events))
