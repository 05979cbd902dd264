"""The metrics of a service at one moment, and their change between two moments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from service.metrics import Counter, Histogram, Series
from service.top.quantiles import Distribution, increase, observed_since

Labels = frozenset[tuple[str, str]]
COUNTER_SUFFIX, SUM_SUFFIX, BUCKET_SUFFIX, BOUND = "_total", "_sum", "_bucket", "le"


@dataclass(frozen=True, slots=True)
class Scrape:
    """Every sample by its name and labels. at: the moment, in seconds of a monotonic clock."""

    at: float = 0.0
    samples: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, at: float) -> Scrape:
        """Return the metrics in Prometheus' text format. Raises ValueError for another text."""
        samples: dict[str, dict[Labels, float]] = defaultdict(dict)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name][frozenset((name, printable(value)) for name, value in sample.labels.items())] = (
                    sample.value
                )
        return cls(at, dict(samples))

    def has(self, series: Series) -> bool:
        return bool(self.values(series))

    def values(self, series: Series) -> Mapping[Labels, float]:
        """Return the values of a gauge or a counter by their labels."""
        return self.samples.get(series.name + (COUNTER_SUFFIX if isinstance(series, Counter) else ""), {})

    def total(self, series: Series, **labels: str) -> float:
        """Return the sum of a gauge or a counter over all series with these labels."""
        return sum(value for found, value in self.values(series).items() if labels.items() <= found)

    def by(self, series: Series, *names: str) -> dict[tuple[str, ...], float]:
        """Return the sums of a gauge or a counter by the values of these labels."""
        return _grouped(self.values(series).items(), names)

    def histograms(self, series: Histogram) -> dict[Labels, Distribution]:
        """Return a histogram by its labels."""
        buckets: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
        for labels, value in self.samples.get(series.name + BUCKET_SUFFIX, {}).items():
            bound = dict(labels)[BOUND]
            buckets[labels - {(BOUND, bound)}].append((float(bound), value))
        sums = self.samples.get(series.name + SUM_SUFFIX, {})
        return {labels: Distribution.of_cumulative(pairs, sums.get(labels, 0.0)) for labels, pairs in buckets.items()}


@dataclass(frozen=True, slots=True)
class Change:
    """The changes between two scrapes."""

    before: Scrape
    now: Scrape

    @property
    def seconds(self) -> float:
        return self.now.at - self.before.at

    def fell(self, counter: Counter) -> bool:
        """Return whether a counter fell, as it does when its service is restarted."""
        return self.now.total(counter) < self.before.total(counter)

    def rate(self, counter: Counter, **labels: str) -> float:
        """Return the rise per second of a counter over all series with these labels."""
        return sum(rise for found, rise in self._rises(counter) if labels.items() <= found) / self.seconds

    def rates(self, counter: Counter, *names: str) -> dict[tuple[str, ...], float]:
        """Return the rise per second of a counter by the values of these labels."""
        return {values: rise / self.seconds for values, rise in _grouped(self._rises(counter), names).items()}

    def observed(self, histogram: Histogram, *names: str) -> dict[tuple[str, ...], Distribution]:
        """Return the values that were observed, by the values of these labels."""
        groups: dict[tuple[str, ...], Distribution] = defaultdict(Distribution)
        earlier = self.before.histograms(histogram)
        for labels, found in self.now.histograms(histogram).items():
            groups[_values(labels, names)] += observed_since(earlier.get(labels, Distribution()), found)
        return dict(groups)

    def _rises(self, counter: Counter) -> Iterator[tuple[Labels, float]]:
        earlier = self.before.values(counter)
        for labels, value in self.now.values(counter).items():
            yield labels, increase(earlier.get(labels, 0.0), value)


def _values(labels: Labels, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the values of these labels, empty for a label that is missing."""
    found = dict(labels)
    return tuple(found.get(name, "") for name in names)


def _grouped(values: Iterable[tuple[Labels, float]], names: tuple[str, ...]) -> dict[tuple[str, ...], float]:
    """Return the sums by the values of these labels."""
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for labels, value in values:
        sums[_values(labels, names)] += value
    return dict(sums)


def printable(text: str) -> str:
    """Return a text without characters that could control a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
