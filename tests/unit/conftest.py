"""What several unit tests use."""

import sys

import pytest

from cluster.cli import main as cli


@pytest.fixture
def run(monkeypatch, capfd):
    """Run the command in this process: run("serve", "x.yaml") -> (exit status, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        status = 0
        try:
            cli.main()
        except SystemExit as exit:
            status = exit.code or 0
        out, err = capfd.readouterr()
        return status, out, err

    return call


@pytest.fixture
def refuse(run):
    """Run a command that is wrong and return the one line that says why."""

    def call(*arguments):
        status, out, err = run(*arguments)
        assert (status, out) == (2, ""), err
        assert err.startswith("paceline: ")
        assert err.count("\n") == 1, err
        return err.removeprefix("paceline: ").rstrip("\n")

    return call
