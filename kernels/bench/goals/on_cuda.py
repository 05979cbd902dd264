"""The goals of all families on a GPU."""

from __future__ import annotations

from kernels.bench.convolutions import IDS_FORMS, LARGE, PRODUCT, embedded, temporal, text_cnn, text_cnn_ids
from kernels.bench.goals.evaluation import Goal, Times, Value, fixed_us, over, speedup, step_us, time_of
from kernels.bench.goals.limit import Limit
from kernels.bench.weights import family_of
from kernels.bench.work import multiplications
from kernels.bench.workload import EMBEDDED, FORMS, LONG_MEMORY, Workload
from kernels.bench.workloads import (
    FOLDED_FORMS,
    RECURRENCE_STEPS,
    bidirectional,
    deep,
    in_figure,
    next_steps,
    one_long_row,
    workloads,
)


def equal(family: str, dtype: str = "float16") -> list[Workload]:
    """Return the layers over rows of equal lengths of an LSTM or a GRU."""
    layers = [workload for workload in workloads(family, "cuda", quick=False) if workload.kind == "layer"]
    return [workload for workload in layers if (workload.dtype, workload.lengths) == (dtype, "equal")]


LSTM = [workload for workload in workloads("lstm", "cuda", quick=False) if workload.dtype == "float16"]
QUESTIONS = [workload for workload in LSTM if workload.lengths == "questions"]
RECURRENCES = [workload for workload in LSTM if workload.kind == "recurrence" and workload.steps == RECURRENCE_STEPS[0]]
ONE_ROW_OF_512 = [workload for workload in equal("lstm") if (workload.hidden, workload.rows) == (512, 1)]

SCANS = [workload for family in FORMS for workload in workloads(family, "cuda", quick=False) if workload.in_grid]
COPIES = [workload for workload in SCANS if workload.kind == "copy"]

ONE_ROW, MANY_ROWS = ([text_cnn_ids(rows, form, dtype="float16") for form in IDS_FORMS] for rows in (1, 1024))
VECTORS = text_cnn(1024, dtype="float16")
TEMPORAL = temporal(1, 256, dtype="float16")

STEP_US, FIXED_US = 0.025, 6.0
"""Allowed time of a step of an SRU v2 (its steps are sequential), and allowed fixed time of any call."""
STEPS = f"{STEP_US * 1e3:g} ns a step and {FIXED_US:g} us"


def _steps_us(workload: Workload) -> float:
    return workload.steps * STEP_US + FIXED_US


def _product_or_steps_us(times: Times, workload: Workload) -> float:
    return max(1.25 * times.of("one product", workload), _steps_us(workload))


def _copied_terabytes(times: Times, copy: Workload) -> float:
    """Return the terabytes that the device reads and writes in a second of a float16 copy."""
    return 2 * copy.steps * copy.inputs * 2 / times.of("device copy", copy) / 1e6


def _folded_us(times: Times, workload: Workload) -> float:
    """Return twice the time in which the device copies the bytes that a folded layer gathers, or a minimum."""
    family = family_of(workload)
    blocks = len(family.gates) + len(family.table_gates)
    gathered = workload.rows * workload.steps * blocks * workload.hidden * 2
    minimum = _steps_us(workload) if workload.form == "v2" else FIXED_US
    copy = next(copy for copy in COPIES if copy.family == workload.family)
    return max(2 * gathered / (1e6 * _copied_terabytes(times, copy)), minimum)


def _teraflops(times: Times, product: Workload) -> float:
    return 2 * multiplications(product) / times.of("one product", product) / 1e6


def _share_of_product_rate(times: Times, workload: Workload) -> float:
    return 2 * multiplications(workload) / times.ours(workload) / 1e6 / _teraflops(times, PRODUCT["cuda"])


def _scans(family: str, kind: str, form: str) -> list[Workload]:
    return [workload for workload in SCANS if (workload.family, workload.kind, workload.form) == (family, kind, form)]


def _layer_goals(family: str, form: str) -> list[Goal]:
    cells, name = _scans(family, "layer", form), f"{family} layer {form} over"
    if form == "v2":
        allowed = f"1.25 products or, if longer, {STEPS}"
        return [Goal(f"{name} {allowed}", cells, over(_product_or_steps_us), Limit(1, "times"), has_grid=True)]
    value, grid = over(time_of("one product")), len(cells) > 1
    largest = Goal(f"{name} one product", cells, value, Limit(2, "times"), has_grid=grid)
    share = Goal(f"{name} one product, share within 1.25 times", cells, value, Limit(0.8), "share", within=1.25)
    return [share, largest] if grid else [largest]


def _folded_goal(family: str, form: str) -> Goal:
    minimum = STEPS if form == "v2" else f"{FIXED_US:g} us"
    name = f"{family} folded {form} over twice its bytes or, if longer, {minimum}"
    return Goal(name, _scans(family, "folded", form), over(_folded_us), Limit(1, "times"), has_grid=True)


def _figure_goals(form: str) -> list[Goal]:
    """Return the goals of layers that return every step, as in the figure of Lei et al. 2018."""
    cells, name = [workload for workload in SCANS if in_figure(workload) and workload.form == form], f"sru every step {form}"
    by_steps = {steps: [workload for workload in cells if workload.steps == steps] for steps in (128, 32)}
    lstm = speedup("torch LSTM")
    widths: dict[int, Value] = {
        width: speedup(f"conv1d width {width}", f"conv1d width {width}, channels last") for width in (2, 3)
    }
    return [
        Goal(f"{name}, torch LSTM, 128 steps", by_steps[128], lstm, Limit(10), has_grid=True),
        Goal(f"{name}, torch LSTM, 32 steps", by_steps[32], lstm, Limit(6), has_grid=True),
        *(Goal(f"{name}, conv1d width {width}", cells, value, Limit(1), has_grid=True) for width, value in widths.items()),
    ]


def _long_row_goal(cell: Workload) -> Goal:
    """The package's kernel cannot be captured in a CUDA graph, and its eager time on a long row is the device's."""
    baseline = "sru package" if cell.family == "sru" else "sru package v1"
    name = f"{cell.family} layer {cell.form}, {baseline}, eager over our kernel"
    return Goal(name, [cell], speedup(baseline, timing="eager", ours="kernel"), Limit(40))


_FORMS = FORMS | {"sru": (*FORMS["sru"], LONG_MEMORY)}


def _name(forms: list[Workload]) -> str:
    return str(forms[0]).replace(f" {EMBEDDED}", "")


_PADDED, _PACKED = speedup("torch padded"), speedup("torch packed", timing="eager")
_BY_STEP, _BY_GATE = (speedup(f"torch by {unit}", timing="eager") for unit in ("step", "gate"))
_SHORT_STEP, _LONG_STEP = (
    [workload for workload in RECURRENCES if (workload.hidden <= 256) is small] for small in (True, False)
)
_LIBRARY = "torch conv1d"


def _gated_goals(family: str, deep_limit: Limit) -> list[Goal]:
    """Return the goals of an LSTM or a GRU against cuDNN over rows of equal lengths, both in a graph."""
    name, halves, singles = f"{family}, torch padded, kernel", equal(family), equal(family, "float32")
    large = [cell for cell in halves if cell.hidden >= 1024 and cell.rows >= 64]
    few, more = ([cell for cell in singles if cell.rows in rows] for rows in ((1, 8), (32,)))
    both_ways = [bidirectional(family, rows) for rows in (1, 32)]
    return [
        Goal(f"{name}, geometric mean", halves, _PADDED, Limit(2.9), "mean"),
        Goal(f"{name}, smallest", halves, _PADDED, Limit(1.2), has_grid=True),
        Goal(f"{name}, at least 1024 units and 64 rows, smallest", large, _PADDED, Limit(1.5)),
        Goal(f"{name}, float32, up to 8 rows, geometric mean", few, _PADDED, Limit(3), "mean"),
        Goal(f"{name}, float32, 32 rows, geometric mean", more, _PADDED, Limit(2), "mean"),
        Goal(f"{name}, float32, smallest", singles, _PADDED, Limit(1), has_grid=True),
        Goal(f"{name}, 2 levels, both directions", both_ways, _PADDED, Limit(4), "each"),
        Goal(f"{name}, 4 levels", [deep(family, "float16")], _PADDED, deep_limit, "each"),
    ]


def _next_steps_goals(family: str, dtype: str) -> list[Goal]:
    """Return the goals of the next chunks of many live streams."""
    cells = [cell for cell in next_steps(family, dtype, "cuda") if cell.rows >= 512]
    many = [cell for cell in cells if cell.rows >= 2048]
    name, products = f"{family}, next steps, {dtype}", over(time_of("step products"))
    return [
        Goal(f"{name}, torch padded, kernel, geometric mean", cells, _PADDED, Limit(1.3), "mean"),
        Goal(f"{name}, torch padded, kernel, smallest", cells, _PADDED, Limit(1), has_grid=True),
        Goal(f"{name}, 2048 rows or more over their products", many, products, Limit(1.25, "times"), has_grid=True),
    ]


GOALS = [
    # LSTM and GRU: the value of a comparison is the baseline's time as a multiple of our backend's.
    *_gated_goals("lstm", Limit(2.5)),
    *_gated_goals("gru", Limit()),
    *(goal for family in ("lstm", "gru") for dtype in ("float16", "bfloat16") for goal in _next_steps_goals(family, dtype)),
    Goal("recurrence, a step", _SHORT_STEP, step_us, Limit(0.45, "us"), "each"),
    Goal("recurrence, a step", _LONG_STEP, step_us, Limit(0.6, "us"), "each"),
    Goal("recurrence, fixed", RECURRENCES, fixed_us, Limit(8, "us"), "each"),
    Goal("questions, torch packed, eager, geometric mean", QUESTIONS, _PACKED, Limit(5), "mean", has_grid=True),
    Goal(
        "questions, torch packed, eager",
        [workload for workload in QUESTIONS if (workload.hidden, workload.rows) == (256, 64)],
        _PACKED,
        Limit(8),
        "each",
    ),
    Goal("questions, torch padded, kernel, smallest", QUESTIONS, _PADDED, Limit(), has_grid=True),
    Goal("torch by gate, eager", ONE_ROW_OF_512, _BY_GATE, Limit(140), "each"),
    Goal("torch by step, eager", ONE_ROW_OF_512, _BY_STEP, Limit(), "each"),
    # SRU and QRNN: a layer is compared with one product of its size, with the bytes that it gathers, and with layers it could replace.
    Goal("device copy, bytes read and written", COPIES, _copied_terabytes, Limit(None, "TB/s"), "best form", context=True),
    *(goal for family, forms in _FORMS.items() for form in forms for goal in _layer_goals(family, form)),
    *(_folded_goal(family, form) for family, forms in FOLDED_FORMS.items() for form in forms),
    *(goal for form in FORMS["sru"] for goal in _figure_goals(form)),
    *(_long_row_goal(cell) for cell in filter(one_long_row, SCANS) if cell.form != "v2"),
    # Convolutions: of two forms over token ids, the faster form counts.
    Goal("one product", [PRODUCT["cuda"]], _teraflops, Limit(None, "TFLOP/s"), "best form", context=True),
    Goal(f"{LARGE}, share of the product rate", [LARGE], _share_of_product_rate, Limit(0.85), "best form"),
    Goal(_name(ONE_ROW), ONE_ROW, Times.ours, Limit(10, "us"), "best form"),
    Goal(f"{_name(MANY_ROWS)}, {_LIBRARY}", MANY_ROWS, speedup(_LIBRARY, at=embedded), Limit(3), "best form"),
    Goal(f"{VECTORS}, {_LIBRARY}", [VECTORS], speedup(_LIBRARY), Limit(3), "best form"),
    Goal(f"{TEMPORAL}, {_LIBRARY}", [TEMPORAL], speedup(_LIBRARY), Limit(4), "best form"),
]
