"""Goals of the convolutions: a large text CNN is held against one product of the same run, a small one from token ids against a time, and
others against what the library takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kernels.bench.convolutions import IDS_FORMS, LARGE, PRODUCT, temporal, text_cnn, text_cnn_ids
from kernels.bench.goals.common import HEADING, Goal, Line, Times
from kernels.bench.report import aligned
from kernels.bench.shares import multiplications
from kernels.bench.workload import EMBEDDED, Workload

ONE_ROW, MANY_ROWS = ([text_cnn_ids(rows, form, dtype="float16") for form in IDS_FORMS] for rows in (1, 1024))
"""The same text CNN in each of our forms."""

VECTORS = text_cnn(1024, dtype="float16")
TEMPORAL = temporal(1, 256, dtype="float16")


def table(times: Times) -> str:
    """Empty without a figure that a goal speaks of."""
    lines = [*_share(times), *_ids(times), *_ratio([VECTORS], 3, times), *_ratio([TEMPORAL], 4, times)]
    return aligned([HEADING, *_product(times), *lines]) if lines else ""


def _product(times: Times) -> Iterator[Line]:
    rate = _rate("one product", PRODUCT["cuda"], times)
    if rate is not None:
        yield "one product", f"{2 * rate / 1e6:.4g} TFLOP/s", "", ""


def _share(times: Times) -> Iterator[Line]:
    ours, product = _rate(times.chosen(LARGE), LARGE, times), _rate("one product", PRODUCT["cuda"], times)
    if ours is not None and product is not None:
        yield Goal(0.85).line(f"{LARGE}, share of the product rate", ours / product)


def _ids(times: Times) -> Iterator[Line]:
    """Of two forms the faster one counts; of one alone it is not known whether it is."""
    fastest = _fastest(ONE_ROW, times)
    if fastest is not None:
        yield Goal(10, "us").line(_name(ONE_ROW), fastest[0], fastest[1].form, whole=_all_timed(ONE_ROW, times))
    yield from _ratio(MANY_ROWS, 3, times)


def _ratio(forms: Sequence[Workload], limit: float, times: Times) -> Iterator[Line]:
    """How many times as long the library takes; over token ids it is timed once, beside the embedded form."""
    fastest, theirs = _fastest(forms, times), times.of("torch conv1d", forms[0], "kernel")
    if fastest is not None and theirs is not None:
        ours, one = fastest
        note = one.form if len(forms) > 1 else ""
        yield Goal(limit).line(f"{_name(forms)}, torch conv1d", theirs / ours, note, whole=_all_timed(forms, times))


def _fastest(forms: Sequence[Workload], times: Times) -> tuple[float, Workload] | None:
    found = [(taken, one) for one in forms if (taken := times.ours(one, "kernel")) is not None]
    return min(found, key=lambda pair: pair[0]) if found else None


def _all_timed(forms: Sequence[Workload], times: Times) -> bool:
    return all(times.ours(one, "kernel") is not None for one in forms)


def _rate(backend: str, workload: Workload, times: Times) -> float | None:
    """Multiplications in a microsecond."""
    taken, many = times.of(backend, workload, "kernel"), multiplications(workload)
    return None if taken is None or many is None else many / taken


def _name(forms: Sequence[Workload]) -> str:
    """Without the form, where there are several."""
    return str(forms[0]).replace(f" {EMBEDDED}", "")
