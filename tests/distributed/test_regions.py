"""Two clusters of processes and a directory between them: what the group of one has learnt, the other drafts from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from paceline_testing.deployed import wait_for
from paceline_testing.free_ports import free_ports
from paceline_testing.scraped import value_of
from paceline_testing.served_command import assert_ends, serving, wait_for_line
from paceline_testing.tiny_models import save_tiny_model

PROMPT = "oak and oak, then again oak"
NEW_TOKENS = 100


class Region:
    """A cluster that has a registry with one tenant of the group `research`."""

    def __init__(self, name: str, directory: Path, model: Path) -> None:
        self.name, self.home = name, directory / name
        self.home.mkdir()
        self.key = self.paceline("tenant", "add", f"tenant-of-{name}", "--policy", "group", "--group", "research")
        (self.metrics_port,) = free_ports(1)
        settings = ["device=cpu", "exact=bitwise", "kv_cache_tokens=8192", "health_timeout_s=60"]
        regions = [f"url={(directory / 'between').as_uri()}", f"cluster={name}", "interval_s=0.5"]
        self.options = [
            *map("target.{}".format, settings),
            *map("cache.regions.{}".format, regions),
            "speculation.drafters=[cache]",
            f"gateway.metrics_port={self.metrics_port}",
            "gateway.metrics_interval_s=1",
            "gateway.replicas=1",
        ]
        self.model = model

    def paceline(self, *arguments: str) -> str:
        command = [str(Path(sys.executable).with_name("paceline")), *arguments]
        environment = {**os.environ, "PACELINE_HOME": str(self.home)}
        return subprocess.run(command, env=environment, text=True, capture_output=True, check=True).stdout.strip()

    def ask(self, port: int) -> str:
        body = {"prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {self.key.split()[-1]}"}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def metric(self, name: str, **labels: str) -> float:
        found = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=60)
        return value_of(found.text, name, **labels)


@pytest.mark.slow
@pytest.mark.timeout(900)  # two starts of Ray
def test_one_cluster_drafts_from_what_another_has_learnt_until_it_is_purged_there(tmp_path):
    model = save_tiny_model(tmp_path / "model", "llama", 5, layers=4, hidden_size=96, heads=6, kv_heads=3)
    asia, europe = (Region(name, tmp_path, model) for name in ("asia", "europe"))
    with ExitStack() as stack:  # one after the other, since both look for free ports
        first, asia_port = stack.enter_context(serving(model, *asia.options, home=asia.home))
        started = wait_for_line(first, "ready")
        second, europe_port = stack.enter_context(serving(model, *europe.options, home=europe.home))
        others = wait_for_line(second, "ready")
        text = asia.ask(asia_port)
        wait_for(lambda: europe.metric("paceline_cache_regions_segments") >= 1, "an import")
        before = europe.metric("paceline_spec_decode_num_accepted_tokens_total", source="cache")

        assert europe.ask(europe_port) == text
        accepted = lambda: europe.metric("paceline_spec_decode_num_accepted_tokens_total", source="cache")  # noqa: E731
        wait_for(lambda: accepted() - before > 0, "drafts from the other cluster")
        print(
            f"{accepted() - before:.0f} of {NEW_TOKENS} tokens from asia's cache", europe.paceline("cache", "regions")
        )

        names = {each["namespace"] for each in json.loads(asia.paceline("cache", "list", "--json"))}
        (learnt,) = {name.removesuffix(".REGIONS") for name in names}
        asia.paceline("cache", "purge", "--namespace", learnt, "--yes")
        wait_for(lambda: europe.metric("paceline_cache_regions_segments") == 0, "the purge")
        for server, processes in ((first, started), (second, others)):
            os.kill(server.pid, signal.SIGINT)
            assert_ends(server, processes)
