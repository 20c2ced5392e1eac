"""What Prometheus scrapes.

- `counts` keeps what is counted as it happens, in plain dicts; `facts` reads at the scrape what others know (in flight,
  states, index), which is never mirrored; `families` makes `prometheus_client` families of both; `exposition` puts
  them together.
- All counting is done on the event loop, so the library's own counters would add a lock to each increment, a linear
  search to each observation (10 µs a request instead of 1), and a `_created` series to each series.
- Label sets are closed. Names that are not ours to choose (models) count as `other` unless an instance lists them, and
  then up to a bound; `none` stands for "there was none".
- A scrape is a snapshot taken on the event loop and encoded elsewhere: `encode` may run in another thread.
- Two counters, never a ratio. Each pair is counted over the same requests, so that dividing them is exact.
"""

from prefixroute.metrics.counts import MAX_LABEL_CHARS, MAX_MODELS, MAX_REQUEST_SERIES, NONE, OTHER
from prefixroute.metrics.exposition import Metrics, encode
from prefixroute.metrics.facts import ReloadFacts, ReloadOutcome, TokenFacts

__all__ = [
    "MAX_LABEL_CHARS",
    "MAX_MODELS",
    "MAX_REQUEST_SERIES",
    "NONE",
    "OTHER",
    "Metrics",
    "ReloadFacts",
    "ReloadOutcome",
    "TokenFacts",
    "encode",
]
