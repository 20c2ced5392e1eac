"""When Python looks for cyclic garbage while the command serves.

A request that goes well leaves none: what it took is freed at its end, by counting. Failures leave some (an exception
holds the frames that hold it; a connection that broke off), a dozen objects each, so the collector stays on. But as it
comes, it looks every few dozen requests, and again and again at what never goes, the modules first of all. So:

- What is there when serving begins is never looked at again: 58,000 objects, for which a full collection would stop the
  event loop for 16 ms.
- The young are looked at once there are 10,000 more of them, not 700: that many take about 1 ms. What garbage may hold
  until then is that of some hundred failures.

Together that took 17 µs off a request, of 340 at the time, for 2 MB at 256 clients. Index and ladder are no matter at
any size: dicts of numbers are not looked at. What is left for a full collection, which now is rare, are the records
kept for `/decisions`: 4 ms for a thousand with eight candidates each, 36 ms at the bound of 64,000 candidates.

For a process that is ours: whoever embeds the router decides for theirs.
"""

import gc

THRESHOLDS = (10_000, 10, 10)


def settle() -> None:
    """Everything is imported and serving is about to begin. Takes some 20 ms, once."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
