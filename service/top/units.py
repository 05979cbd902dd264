"""Numbers as text of a few characters."""

from __future__ import annotations

import math

from service.metrics import SECONDS

THOUSANDS = ((1e9, "G"), (1e6, "M"), (1e4, "k"))
"""Numbers below 10,000 are written out."""
BYTES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def count(value: float) -> str:
    """Return a number of things, such as `9,999` or `12.3 k`."""
    for unit, name in THOUSANDS:
        if value >= unit:
            return f"{_three_digits(value / (1e3 if name == 'k' else unit))} {name}"
    return f"{value:,.0f}"


def per_second(rate: float) -> str:
    """Return a rate, such as `0.4/s` or `1,234/s`."""
    return f"{rate:.1f}/s" if 0 < rate < 10 else f"{count(rate)}/s"


def seconds(value: float) -> str:
    """Return a time, such as `35 us`, `1.25 ms` or `3.2 s`; infinity is above the largest bucket of the service's histograms."""
    if math.isinf(value):
        return f"> {SECONDS[-1]:.0f} s"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    if value < 1.0:
        return f"{_three_digits(value * 1e3)} ms"
    return f"{_three_digits(value)} s" if value < 1000 else f"{value:,.0f} s"


def size(bytes: float) -> str:
    """Return a number of bytes, such as `1.5 GiB`."""
    for unit, name in BYTES:
        if bytes >= unit:
            return f"{_three_digits(bytes / unit)} {name}"
    return f"{bytes:.0f} B"


def share(value: float) -> str:
    """Return a share in percent."""
    return f"{value:.0%}".replace("%", " %")


def _three_digits(value: float) -> str:
    """Return a number with three significant digits, or with all digits before the decimal point."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
