"""What tests of several commands use."""

import pytest


@pytest.fixture
def prompts_file(tmp_path):
    """A file with one prompt."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "abc abc"}\n')
    return path
