"""Takes the pictures of the page for README.md and docs: `python -m tests.long.ui.screenshots FOLDER`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.long.ui.conftest import choose, launched, opened, run
from tests.serving import answering, serving

ROOT = Path(__file__).parents[3]
SIZE = {"width": 1360, "height": 860}
MARGIN = 16
SECONDS = 50
"""Time in which the service gets requests before the pictures, so that the plots show requests."""
QUESTIONS = ("Who wrote Hamlet ?", "Where is Ayers Rock ?", "What is an atom ?", "How many people live in Chile ?")
MODELS = ("question-type-cnn", "question-type-lstm", "question-type-sru")


def main(folder: Path) -> None:
    """Serve the embedded models, and write a picture of each view to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as scratch,
        serving(ROOT / "models", Path(scratch), "--port", "8000", "--grpc-port", "8001") as server,
        answering(server, *({"model": name, "inputs": [*QUESTIONS[:count]]} for name in MODELS for count in (1, 4))),
        launched() as browser,
        opened(browser, server, size=SIZE) as page,
    ):
        page.wait_for_selector("#model-list button[aria-current]")
        page.wait_for_timeout(SECONDS * 1000)
        run(page)
        page.wait_for_timeout(3000)
        page.screenshot(path=folder / "page.png")
        choose(page, "sensor-forecast")
        page.locator("#stream-rate").fill("25")
        page.get_by_role("button", name="Start", exact=True).click()
        run(page)
        page.wait_for_timeout(8000)
        page.evaluate("() => scrollTo(0, 0)")
        for section, name in (("#try", "page-forecast.png"), ("#stream", "page-stream.png")):
            box = page.locator(section).bounding_box()
            assert box is not None
            margins = {
                "x": box["x"] - MARGIN,
                "y": box["y"],
                "width": box["width"] + 2 * MARGIN,
                "height": box["height"] + MARGIN,
            }
            page.screenshot(path=folder / name, clip=margins, full_page=True)  # type: ignore[arg-type]


if __name__ == "__main__":
    began = time.monotonic()
    main(Path(sys.argv[1]))
    print(f"{sys.argv[1]} has the pictures, after {time.monotonic() - began:.0f} s")
