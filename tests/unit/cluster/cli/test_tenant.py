"""`paceline tenant`, and the key of commands that talk to a server.

Covers `cluster.tenants.administration` and `cluster.tenants.keys`, too.
"""

import json

import httpx
import pytest

from actors.errors import InvalidRequest
from cluster.cli.api_key import bearer_headers
from cluster.cli.bench.options import ServeOptions
from cluster.tenants.registry import parse_registry


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    return tmp_path


def registry(home):
    path = home / "tenants.json"
    return parse_registry(path.read_bytes(), str(path))


def test_a_key_is_printed_alone_and_once(run, home):
    status, out, err = run("tenant", "add", "acme", "--requests-per-second", "2.5", "--max-concurrent", "4")
    assert (status, len(out.split())) == (0, 1)
    key = out.strip()
    assert key.startswith("pl-")
    assert key not in err
    (tenant,) = registry(home).tenants
    assert (tenant.limits.requests_per_second, tenant.limits.max_concurrent) == (2.5, 4)
    for arguments in (("tenant", "list"), ("tenant", "list", "--json")):
        status, out, err = run(*arguments)
        assert status == 0
        assert key not in out + err
        assert key.rpartition("-")[2] not in out + err
        assert tenant.keys[0].sha256 not in out + err
        assert key[-4:] in out
        assert tenant.keys[0].id in out
        assert "acme" in out


def test_json_of_add_rotate_and_list(run, home):
    added = json.loads(run("tenant", "add", "acme", "--json")[1])
    rotated = json.loads(run("tenant", "rotate", "acme", "--keep-old-for", "90m", "--json")[1])
    assert set(added) == set(rotated) == {"tenant", "id", "key_id", "key"}
    (listed,) = json.loads(run("tenant", "list", "--json")[1])
    assert [(key["id"], key["live"]) for key in listed["keys"]] == [(added["key_id"], True), (rotated["key_id"], True)]
    assert listed["keys"][0]["expires"] is not None
    assert (listed["policy"], listed["disabled"]) == ("isolated", False)


def test_set_and_remove(run, home):
    run("tenant", "add", "acme", "--cache-bytes", "1000", "--tokens-per-minute", "60")
    status, _, err = run("tenant", "set", "acme", "--cache-bytes", "none", "--disabled", "--policy", "promoted")
    assert (status, err) == (0, "changed acme: cache_bytes none, policy promoted, disabled true\n")
    (tenant,) = registry(home).tenants
    assert (tenant.limits.cache_bytes, tenant.limits.tokens_per_minute) == (None, 60)
    assert (tenant.disabled, tenant.policy) == (True, "promoted")
    assert "class batch" not in run("tenant", "list")[1]
    assert run("tenant", "set", "acme", "--service-class", "batch")[0] == 0
    assert "class batch" in run("tenant", "list")[1]
    assert run("tenant", "set", "acme", "--enabled")[0] == 0
    assert not registry(home).tenants[0].disabled
    assert run("tenant", "remove", "acme", "--key", tenant.keys[0].id)[0] == 0
    assert registry(home).tenants[0].keys == ()
    assert run("tenant", "remove", "acme")[0] == 0
    assert registry(home).tenants == ()
    actions = [json.loads(line)["action"] for line in (home / "tenants-audit.jsonl").read_text().splitlines()]
    assert actions == ["add", "set", "set", "set", "remove_key", "remove"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add", "Acme"), "name is 'Acme'; "),
        (("add", "b", "--requests-per-second", "nan"), "requests_per_second is 'nan'; it must be a number, or none"),
        (("add", "b", "--max-concurrent", "1.5"), "max_concurrent is '1.5'; it must be a whole number, or none"),
        (("add", "b", "--policy", "shared"), "policy is 'shared'; the cluster's tenants.allow_shared must be true"),
        (("rotate", "a", "--keep-old-for", "1w"), "--keep-old-for is '1w'; write a whole number with s, m, h or d"),
        (("rotate", "b"), "name is 'b'; there is no such tenant; there are: a"),
        (("set", "a"), "name at least one thing to change"),
        (("add", "b", "--config", "/nonexistent.yaml"), "/nonexistent.yaml: No such file"),
    ],
)
def test_errors_are_one_line_that_names_field_value_and_limit(run, refuse, home, arguments, message):
    run("tenant", "add", "a")
    before = (home / "tenants.json").read_bytes()
    assert message in refuse("tenant", *arguments)
    assert (home / "tenants.json").read_bytes() == before


def test_the_clusters_configuration_says_where_the_registry_is_and_what_it_allows(run, tmp_path):
    config = tmp_path / "cluster.yaml"
    config.write_text(f"tenants: {{file: {tmp_path}/mine.json, allow_shared: true}}\n")
    assert run("tenant", "add", "a", "--policy", "shared", "--config", config)[0] == 0
    assert not (tmp_path / "tenants.json").exists()
    status, out, _ = run("tenant", "list", "--set", f"tenants.file={tmp_path}/mine.json")
    assert status == 0
    assert "shared" in out


def test_serve_refuses_to_be_open_to_others_before_anything_starts(refuse):
    settings = ("gateway.host=0.0.0.0", "gateway.http_port=18431", "gateway.grpc_port=18432")
    line = refuse("serve", *(part for each in settings for part in ("--set", each)))
    assert "gateway.host is '0.0.0.0'" in line
    assert "paceline tenant add" in line


def test_a_key_for_a_server_goes_into_its_header_and_nowhere_else():
    assert bearer_headers(None) == bearer_headers("") == {}
    assert bearer_headers(" pl-1-2\n") == {"Authorization": "Bearer pl-1-2"}
    with pytest.raises(InvalidRequest) as caught:
        bearer_headers("pl-secret\nX: y")
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(ServeOptions(api_key="secret"))


def test_chat_and_bench_send_the_key_that_they_are_given(run, monkeypatch, prompts_file):
    seen = []

    def refuse_all(_, request):
        seen.append(request.headers["authorization"])
        return httpx.Response(401)

    async def refuse_all_later(_, request):
        return refuse_all(_, request)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", refuse_all)
    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", refuse_all_later)
    assert run("chat", "--url", "http://server", "--api-key", "pl-1")[0] == 2
    monkeypatch.setenv("PACELINE_API_KEY", "pl-2")
    status, out, err = run("bench", "serve", "--url", "http://server", "--prompts", prompts_file)
    assert status == 2
    assert "401" in err
    assert "pl-2" not in out + err
    assert seen == ["Bearer pl-1", "Bearer pl-2"]
