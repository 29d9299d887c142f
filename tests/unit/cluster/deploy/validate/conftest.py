"""The command that is tested here."""

import pytest


@pytest.fixture
def validated(run):
    """validated(*arguments, status=0): what `paceline validate` prints on stdout when it ends with this status."""

    def call(*arguments, status=0):
        found, out, err = run("validate", *arguments)
        assert found == status, out + err
        return out

    return call
