"""Pictures of a report for the documentation: `make screenshots`.

One screen of each part, as wide as a desktop, a tablet and a phone, and the first sheet of paper:
easier to read than one long strip.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

VIEWS = {
    "desktop": {"viewport": {"width": 1280, "height": 960}},
    "tablet": {"viewport": {"width": 768, "height": 1024}},
    "phone": {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 1.5},
}
PARTS = {
    "top": "The demo: private handwritten digits",
    "results": "Results",
    "guarantee": "What is guaranteed",
}
SHEET = {"width": 703, "height": 1032}  # A4 within its margins, in pixels
FRAME = "body::after { content: ''; position: fixed; inset: 0; border: 1px solid #c4cad0; }"
LARGEST = 400_000  # bytes: they live in the repository


def main(report: Path, out: Path) -> None:
    """Take every part of the report in every view."""
    # The system's browser where there is one: playwright's own is a large download.
    found = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for view, options in VIEWS.items():
            page = browser.new_page(color_scheme="light", **options)
            page.goto(report.resolve().as_uri())
            page.add_style_tag(content=FRAME)  # white on white has no edge
            for part, heading in PARTS.items():
                take(page, heading, out / f"report-{view}-{part}.png")
        page = browser.new_page(viewport=SHEET)
        page.emulate_media(media="print")
        page.goto(report.resolve().as_uri())
        take(page, PARTS["top"], out / "report-print.png")
        browser.close()


def take(page: Any, heading: str, path: Path) -> None:
    """The screen that begins with this heading."""
    page.get_by_role("heading", name=heading, exact=True).evaluate(
        "heading => scrollTo(0, heading.getBoundingClientRect().top + scrollY - 24)"
    )
    page.screenshot(path=path)
    size = path.stat().st_size
    if size > LARGEST:
        raise ValueError(f"{path} has {size:,} bytes: take a smaller view.")
    print(f"{path}: {size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
