"""One visit to the pages of a gateway, with everything that the browser did."""

from __future__ import annotations

from typing import Any, Self

_WATCH_POLICY = """
window.violations = [];
document.addEventListener('securitypolicyviolation', (event) => violations.push(event.violatedDirective));
"""


class Visit:
    """A fresh browser profile on one page. Leaving it checks that the page kept to itself."""

    def __init__(self, browser: Any, origin: str, **options: Any) -> None:
        """options: of playwright's `new_context`, such as viewport and color_scheme."""
        self.origin = origin
        self.requests: list[str] = []
        self.troubles: list[str] = []
        self._context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        self._context.set_default_timeout(5000)
        self._context.add_init_script(_WATCH_POLICY)
        self.page = self._context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("console", self._note)
        self.page.on("dialog", lambda dialog: self.troubles.append(f"dialog: {dialog.message}"))

    def _note(self, message: Any) -> None:
        # Chromium reports every status of 400 and more, which the page itself tells its reader.
        if message.type in ("error", "warning") and "the server responded with a status of" not in message.text:
            self.troubles.append(message.text)

    def open(self, path: str = "/") -> Any:
        self.page.goto(self.origin + path)
        return self.page

    def send(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._check()
        finally:
            self._context.close()

    def _check(self) -> None:
        stored = self.page.evaluate(
            "async () => [localStorage.length, sessionStorage.length, document.cookie,"
            " (await indexedDB.databases()).length, location.search, location.hash]"
        )
        assert stored == [0, 0, "", 0, "", ""]
        assert self._context.cookies() == []
        assert self.page.evaluate("violations") == []
        assert [url for url in self.requests if not url.startswith((self.origin + "/", "data:"))] == []
        assert self.troubles == []
