"""`prometheus_client` families of plain values. Names are given without `prefixroute_` in front."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

Samples = Iterable[tuple[Sequence[str], float]]
"""Values by their labels."""


class Histogram:
    """Observations in buckets; a bound belongs to its bucket."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        # Floats are found faster among their like.
        self.bounds = [*map(float, bounds)]
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def counter(name: str, help_text: str, labels: Sequence[str], samples: Samples) -> Metric:
    """`name` without its `_total`."""
    family = CounterMetricFamily(f"prefixroute_{name}", help_text, labels=labels)
    for values, n in samples:
        family.add_metric(values, n)
    return family


def gauge(name: str, help_text: str, labels: Sequence[str], samples: Samples) -> Metric:
    family = GaugeMetricFamily(f"prefixroute_{name}", help_text, labels=labels)
    for values, n in samples:
        family.add_metric(values, n)
    return family


def histogram(
    name: str, help_text: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], Histogram]]
) -> Metric:
    family = HistogramMetricFamily(f"prefixroute_{name}", help_text, labels=labels)
    for values, observed in samples:
        bounds = [*map(floatToGoString, observed.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(observed.counts)), strict=True))
        family.add_metric(values, buckets, observed.total)
    return family
