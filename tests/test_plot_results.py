"""The figures of docs/sru-paper.md are drawn from records, and leave out figures without a record."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kernels.bench.tables import RESULTS

pytestmark = pytest.mark.usefixtures("examples")

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "sru-paper.md"
PLACE = {"date": "2026-01-02", "processor": "Abacus"}


@pytest.fixture
def plot() -> Any:
    return importlib.import_module("plot_results")


def training(encoder: str, seed: int, curve: list[tuple[float, float | None]], **more: Any) -> dict[str, Any]:
    epochs = [{"seconds": seconds, "development_percent": percent} for seconds, percent in curve]
    run = {"kind": "training", "set": "trec", "encoder": encoder, "fold": 0, "seed": seed, "pretrained": None, "quick": False}
    return {**run, "trained_percent": 80.0 + seed, "training_seconds": 10.0 * seed, "curve": epochs, **PLACE, **more}


def draw(plot: Any, folder: Path, records: list[dict[str, Any]], bench: Path = RESULTS) -> tuple[int, Path]:
    """Run the command on some records and a copy of the page, and return its status and the copy."""
    results, page = folder / "results.jsonl", folder / "page.md"
    results.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    shutil.copy(PAGE, page)
    line = ["--results", str(results), "--bench", str(bench), "--page", str(page), "--images", str(folder)]
    return plot.main(line), page


def test_curve_is_the_mean_of_the_best_epochs_so_far(plot: Any) -> None:
    """It begins when both runs have finished an epoch; the second run has ended when the first reaches its best epoch."""
    times, means, deviations = plot.mean_curve([[(1.0, 50.0), (2.0, 40.0), (4.0, 70.0)], [(1.5, 60.0), (3.0, 80.0)]])
    assert times == [1.5, 2.0, 3.0, 4.0]
    assert means == [55.0, 55.0, 65.0, 75.0] and deviations == [5.0, 5.0, 15.0, 5.0]


def test_page_and_images_are_drawn_from_records(plot: Any, tmp_path: Path) -> None:
    records = [
        training("sru", 1, [(1.0, 9.0)]),  # replaced by the next record of the same run
        training("sru", 1, [(1.0, 50.0), (2.0, 70.0)]),
        training("sru", 2, [(1.0, 60.0), (2.0, 65.0)]),
        training("cnn", 1, [(0.5, 60.0)], set="mr"),
        training("gru", 1, [(0.5, 60.0)]),
        training("lstm", 1, [(0.5, None)]),
        training("lstm", 2, [(0.5, 60.0)], quick=True),
        training("qrnn", 1, [(0.5, 60.0)], pretrained="vectors.txt"),
        {"kind": "served", "set": "trec", "encoder": "sru", "seed": 1, "pretrained": None, "quick": False, **PLACE},
    ]
    status, page = draw(plot, tmp_path, records)
    assert status == 0 and (text := page.read_text()).count("](accuracy-time.svg)") == text.count("](layer-speed.svg)") == 1
    assert "| model | MR, % | s | TREC, % | s |" in text and "| SRU | – | – | 81.5 ± 0.7 | 15 |" in text
    assert "| CNN | 81.0 | 10 | – | – |" in text and "| GRU |" in text and "QRNN |" not in text.partition("| model |")[2]
    assert "Trained on Abacus, from 2026-01-02 to 2026-01-02." in text
    chart = (tmp_path / "accuracy-time.svg").read_text()
    assert ">SRU, runs: 2<" in chart and ">CNN, runs: 1<" in chart and ">TREC<" in chart and ">MR<" in chart
    assert "LSTM" not in chart and "GRU" not in chart and "QRNN" not in chart


def test_without_records_the_page_says_so(plot: Any, tmp_path: Path) -> None:
    status, page = draw(plot, tmp_path, [])
    assert status == 0 and page.read_text().count("No measurements are recorded yet.") == 2
    assert not (tmp_path / "accuracy-time.svg").exists()


def test_speed_is_the_time_of_the_lstm_over_that_of_a_layer(plot: Any, tmp_path: Path) -> None:
    def record(workload: str, form: str, backend: str, steps: int, hidden: int, us: float) -> dict[str, Any]:
        what = {"workload": workload, "form": form, "backend": backend, "rows": 32, "steps": steps, "hidden": hidden}
        return {**what, "timing": "kernel", "median_us": us, "device": "Abacus", "date": "2026-01-02"}

    layers = {plot.LSTM: 600.0, **{layer: 10.0 * (number + 1) for number, layer in enumerate(plot.LAYERS.values())}}
    for family in ("sru", "qrnn"):
        lines = [
            json.dumps(record(workload, form, backends[0], steps, hidden, us))
            for (of, workload, form, backends), us in layers.items()
            for steps, hidden in plot.GROUPS
            if of == family
        ]
        (tmp_path / f"{family}-h200.jsonl").write_text("\n".join(lines))
    status, page = draw(plot, tmp_path, [], tmp_path)
    assert status == 0 and "| 128 | 512 | 600 | 60 | 30 | 20 | 15 | 12 | 10 | 8.57 |" in page.read_text()
    assert "Abacus, 2026-01-02" in (tmp_path / "layer-speed.svg").read_text()


def test_missing_time_is_reported(plot: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = tmp_path / "bench"
    bench.mkdir()
    shutil.copy(RESULTS / "sru-h200.jsonl", bench)
    assert draw(plot, tmp_path, [], bench)[0] == 1
    assert "no kernel time of" in capsys.readouterr().err


def test_page_has_what_the_records_give(plot: Any, tmp_path: Path) -> None:
    """The committed page and images match the committed records."""
    results = ROOT / "examples" / "results.jsonl"
    page, images = tmp_path / "docs" / "sru-paper.md", tmp_path / "docs" / "images"
    images.mkdir(parents=True)
    shutil.copy(PAGE, page)
    assert plot.main(["--results", str(results), "--page", str(page), "--images", str(images)]) == 0
    assert page.read_text() == PAGE.read_text()
    assert all((ROOT / "docs" / "images" / image.name).is_file() for image in images.iterdir())
