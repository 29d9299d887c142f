"""Pictures of the page of a running server, for docs/page: `python tests/browser/screenshots.py http://127.0.0.1:8000`.

Needs what `make test-browser` installs.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import expect, sync_playwright

from paceline_testing.browser_visit import Visit

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "page"
MESSAGE = "Write a Python class Point with x and y, and methods to add, subtract and scale points."
SIMILAR = "Write a Python class Vector with x, y and z, and methods to add, subtract and scale vectors."
PATIENCE_MS = 180_000  # for an answer on a small machine


def answered(visit: Visit, message: str = MESSAGE, compares: bool = False) -> None:
    page = visit.open()
    page.get_by_text("Options").click()
    page.get_by_label("Most tokens").fill("200")
    visit.send(message)
    button = page.get_by_role("button", name="Run without speculation")
    expect(button).to_be_visible(timeout=PATIENCE_MS)
    expect(page.get_by_text("No drafts yet.")).to_have_count(0, timeout=PATIENCE_MS)  # the panel has looked since
    if compares:
        button.click()
        expect(page.locator(".compared")).to_be_visible(timeout=PATIENCE_MS)


def chat(visit: Visit) -> None:
    answered(visit, SIMILAR, compares=True)


def cluster(visit: Visit) -> Any:
    page = visit.open()
    expect(page.get_by_role("row", name="Tokens/s")).to_contain_text(".", timeout=PATIENCE_MS)
    return page.get_by_role("complementary", name="Cluster")


def error(visit: Visit) -> None:
    page = visit.open()
    page.get_by_text("Options").click()
    page.get_by_label("Most tokens").fill("1000000")
    visit.send(MESSAGE)
    expect(page.get_by_role("alert")).to_be_visible()


Scene = Callable[[Visit], Any]  # takes the picture's element, or None for the window
SCENES: dict[str, tuple[Scene, tuple[int, int], str]] = {
    "dark": (answered, (1280, 800), "dark"),
    "chat": (chat, (1280, 720), "light"),
    "narrow": (answered, (390, 844), "light"),
    "error": (error, (800, 480), "light"),
    "cluster": (cluster, (1280, 640), "light"),
}


def main(origin: str, *names: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name in names or SCENES:
            scene, (width, height), scheme = SCENES[name]
            with Visit(browser, origin, color_scheme=scheme) as visit:
                visit.page.set_viewport_size({"width": width, "height": height})
                part = scene(visit) or visit.page
                part.screenshot(path=FOLDER / f"{name}.png", animations="disabled")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), *sys.argv[2:])
