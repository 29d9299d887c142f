"""Where a configuration says that the shared cache is, and that no secret is shown on the way there."""

import pytest

from actors.home import paceline_home
from cache_service.errors import SettingError
from cache_service.formats.key_ring import parse_keys
from cluster.cache.access import KEYS_VARIABLE, PASSWORD_VARIABLE, connection_settings, data_directory, key_ring
from cluster.config import CacheConfig, load_config
from cluster.errors import ConfigError

SECRET = "sesame"
KEY = "0f" * 32


def configured(**fields):
    return CacheConfig.model_validate(fields)


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch):
    for name in (PASSWORD_VARIABLE, KEYS_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("url", [None, "none"])
def test_no_url_names_no_server(url):
    assert connection_settings(configured(url=url)) is None
    assert key_ring(configured(url=url)) is None


def test_passwords_come_from_a_file_before_the_environment_and_are_never_shown(tmp_path, monkeypatch):
    config = configured(url="redis://host:1234/2", username="reader")
    assert connection_settings(config).password is None
    monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)
    assert connection_settings(config).password == SECRET
    file = tmp_path / "password"
    file.write_text("of-the-file\n")
    config = configured(url="redis://host:1234/2", username="reader", password_file=file)
    settings = connection_settings(config)
    assert (settings.password, settings.username) == ("of-the-file", "reader")
    assert str(settings) == "single host:1234"
    assert not [text for text in (repr(settings), repr(config), str(settings)) if "of-the-file" in text]


def test_keys_come_from_a_file_before_the_environment_and_the_newest_encrypts(tmp_path, monkeypatch):
    monkeypatch.setenv(KEYS_VARIABLE, f"1:{KEY},7:{KEY}")
    ring = key_ring(configured())
    assert ring.newest == 7
    assert ring.cipher(1, "namespace")
    file = tmp_path / "keys"
    file.write_text(f"# the first\n3:{KEY}  # and only\n")
    assert key_ring(configured(encryption_file=file)).newest == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        f"1:{KEY}0",
        f"x:{KEY}",
        f"1:{KEY} 1:{KEY}",
        f"0:{KEY}",
        f"1:{KEY[:-1]}g",
        f"{'9' * 5000}:{KEY}",
        f"²:{KEY}",
    ],
)
def test_keys_that_cannot_be_read_are_refused_without_being_shown(text, tmp_path):
    with pytest.raises(SettingError) as refused:
        parse_keys(text)
    assert KEY[:16] not in str(refused.value)
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match="encryption_file") as told:
        key_ring(configured(encryption_file=file))
    assert KEY[:16] not in str(told.value)


def test_files_that_cannot_be_read_are_named_with_their_field(tmp_path):
    absent = tmp_path / "absent"
    with pytest.raises(ConfigError, match=r"cache\.password_file is .*absent"):
        connection_settings(configured(url="redis://host", password_file=absent))
    with pytest.raises(ConfigError, match=r"cache\.encryption_file is .*absent"):
        key_ring(configured(encryption_file=absent))
    with pytest.raises(ConfigError, match=r"cache\.ca_file is .*absent"):
        connection_settings(configured(url="rediss://host", ca_file=absent))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        connection_settings(configured(url="redis://host", password_file=tmp_path / "binary"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([f"cache.url=redis://me:{SECRET}@host"], "url names a user or a password"),
        ([f"cache.url=redis://:{SECRET}@host:99999"], "port of 1 to 65535"),
        ([f"cache.url=http://me:{SECRET}@host"], "rediss://"),
        ([f"cache.url=[redis://me:{SECRET}@host]"], "cache.url is"),
        (["cache.url=redis://host", "cache.ca_file=ca.pem"], "ca_file needs a url with TLS"),
        (["cache.url=rediss://host", "cache.key_file=key.pem"], "go together"),
        (["cache.password_file=password"], "password_file needs a url"),
        (["cache.url=none", "cache.username=me"], "username needs a url"),
        (["cache.max_namespaces=0"], "cache.max_namespaces"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_one_line_without_the_password(settings, told):
    with pytest.raises(ConfigError) as refused:
        load_config(None, settings)
    assert told in str(refused.value)
    assert SECRET not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_servers_own_data_lie_in_the_home_unless_they_are_put_elsewhere(tmp_path):
    assert data_directory(configured()) == paceline_home() / "cache"
    assert data_directory(configured(directory=tmp_path)) == tmp_path
