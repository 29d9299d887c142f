"""Variables of a Ray of ours. A home that cannot be written keeps no server from starting."""

import pytest

from actors.workers.kernel_cache import can_be_made
from actors.workers.ray_environment import prepare_own_ray
from cluster.gateway.door.front_door import GRPC_MARGIN_BYTES, MAX_METADATA_BYTES


@pytest.fixture
def variables(monkeypatch):
    """The environment, as `prepare_own_ray` changes it."""
    found: dict[str, str] = {}
    monkeypatch.setattr("os.environ", found)
    return found


def test_ray_gets_a_token_of_its_own_where_it_can_keep_none(variables, tmp_path):
    (tmp_path / "home").touch()  # a file: nobody can make a directory in it
    variables["HOME"] = str(tmp_path / "home")
    prepare_own_ray("127.0.0.1", 4 << 20)
    assert len(variables["RAY_AUTH_TOKEN"]) == 64


@pytest.mark.parametrize("setting", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"])
def test_a_token_that_is_set_is_left_alone(variables, tmp_path, setting):
    variables |= {"HOME": str(tmp_path / "nowhere"), setting: "chosen"}
    prepare_own_ray("127.0.0.1", 4 << 20)
    assert variables[setting] == "chosen"
    assert len({"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"} & variables.keys()) == 1


def test_ray_keeps_its_token_at_home_where_it_can(variables, tmp_path):
    variables["HOME"] = str(tmp_path)
    prepare_own_ray("127.0.0.1", 4 << 20)
    assert "RAY_AUTH_TOKEN" not in variables


@pytest.mark.parametrize("max_body_bytes", [100_000, 64 << 20])
def test_replicas_read_little_more_of_a_call_than_a_request_may_have(variables, tmp_path, max_body_bytes):
    variables["HOME"] = str(tmp_path)
    prepare_own_ray("127.0.0.1", max_body_bytes)
    limit = int(variables["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"])
    assert max_body_bytes + GRPC_MARGIN_BYTES + MAX_METADATA_BYTES < limit <= max_body_bytes + (1 << 20)


def test_what_can_be_made(tmp_path):
    (tmp_path / "file").touch()
    assert can_be_made(tmp_path)
    assert can_be_made(tmp_path / "one" / "two")
    assert not can_be_made(tmp_path / "file")
    assert not can_be_made(tmp_path / "file" / "one")
