"""Real clients against a served model: here those whose packages are at hand, in `make test-clients` all of them.

The model has random weights: answers are structured because they are constrained, whatever the model says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline_testing.tiny_models import save_tiny_model
from tests.clients.environments import Client, all_clients
from tests.clients.running import run_client
from tests.clients.serve import Served, serving
from tests.clients.table import COLUMNS, table_of, with_table

CLIENTS = {client.name: client for client in all_clients()}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    shape = {"hidden_size": 48, "heads": 4, "kv_heads": 2, "max_positions": 4096}
    with serving(save_tiny_model(tmp_path_factory.mktemp("model"), "llama", 5, layers=2, **shape)) as served:
        yield served


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_has_all_that_it_asks_for(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    client = CLIENTS[name]
    if not client.is_in_ours():
        pytest.skip(f"its packages ({', '.join(client.pins())}) are not in this environment: run `make test-clients`")
    result = run_client(client, request.getfixturevalue("served"), tmp_path / "log.txt", python=sys.executable)
    assert not result.has_failed, f"{result.errors}\n{(tmp_path / 'log.txt').read_text()}"


def test_every_client_is_pinned_and_in_the_table() -> None:
    page = Path("docs/clients.md").read_text()
    for client in CLIENTS.values():
        assert client.pins(), client.name
        for name, version in client.pins().items():
            assert f"{name} {version}" in page, f"{name} {version}: run `make test-clients`"


def test_a_failure_is_told_in_the_table_and_in_the_result(served: Served, tmp_path: Path) -> None:
    client = Client(tmp_path / "broken")
    client.directory.mkdir()
    client.requirements.write_text("broken==1.0\n")
    script = "from contract import ability, report\n@ability('plain')\ndef plain():\n    assert False, 'no'\nreport()\n"
    (client.directory / "abilities.py").write_text(script)
    result = run_client(client, served, tmp_path / "log.txt", python=sys.executable)
    assert result.has_failed
    assert result.errors == {"plain": "AssertionError: no"}
    table = table_of([result])
    assert f"| `broken` | broken 1.0 | fails |{'  |' * (len(COLUMNS) - 1)}  |" in table
    page = "before\n<!-- table of clients -->\nold\n<!-- end of table -->\nafter\n"
    assert table in with_table(page, table)
    assert "old" not in with_table(page, table)
