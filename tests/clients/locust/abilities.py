"""locust, with a user that chats."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from contract import MODEL, QUESTION, URL, ability, report

FILE = f"""
from locust import HttpUser, task


class Chat(HttpUser):
    @task
    def ask(self):
        fields = {{"model": {MODEL!r}, "messages": {QUESTION!r}, "max_tokens": 4}}
        self.client.post("/v1/chat/completions", json=fields)
"""


@ability("load")
def load() -> None:
    Path("locustfile.py").write_text(FILE)
    command = [str(Path(sys.executable).with_name("locust")), "--headless", "--host", URL]
    subprocess.run(
        [*command, "--users", "2", "--run-time", "5s", "--exit-code-on-error", "1", "--only-summary"], check=True
    )


if __name__ == "__main__":
    report()
