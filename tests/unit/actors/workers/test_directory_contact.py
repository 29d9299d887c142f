"""Whom a caller of the directory calls."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

from actors.errors import LinkError, Unavailable
from actors.workers import directory_contact as module
from actors.workers.directory_contact import DirectoryContact
from paceline_testing.clock import Clock

OF_DIRECTORY = RayTaskError("follow", "", Unavailable("the directory did not answer")).as_instanceof_cause()


@pytest.fixture
def actors(monkeypatch) -> dict[str, str]:
    """Those that there are, by name."""
    actors = {"directory": "the directory", "one": "relay one", "two": "relay two"}

    def find(name: str, **_: object) -> str:
        try:
            return actors[name]
        except KeyError:
            raise ValueError(name) from None

    monkeypatch.setattr(module, "find_directory", find)
    monkeypatch.setattr(module.ray, "get_actor", find)
    return actors


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def contact(actors, clock) -> DirectoryContact:
    return DirectoryContact("directory", clock)


def test_the_directory_is_called_until_it_names_a_relay_and_then_the_one_that_was_named_last(contact):
    assert contact.find() == "the directory"
    assert not contact.uses_relay
    for named, found in (("one", "relay one"), ("two", "relay two"), ("two", "relay two"), (None, "the directory")):
        contact.answered(named)
        assert contact.find() == found
        assert contact.uses_relay == (named is not None)


def test_a_directory_that_does_not_exist_is_said_and_looked_for_again(contact, actors):
    del actors["directory"]
    with pytest.raises(ValueError, match="directory"):
        contact.find()
    actors["directory"] = "another"
    assert contact.find() == "another"


def test_a_directory_that_is_gone_for_good_is_looked_up_anew_and_one_that_restarts_is_not(contact, actors):
    contact.find()
    actors["directory"] = "another"
    for error in (ActorUnavailableError("restarts", None), GetTimeoutError(), OF_DIRECTORY):
        contact.failed(error)
        assert contact.find() == "the directory"
    contact.failed(ActorDiedError())
    assert contact.find() == "another"


@pytest.mark.parametrize(
    "error", [ActorDiedError(), ActorUnavailableError("", None), GetTimeoutError(), TimeoutError()]
)
def test_a_relay_that_does_not_answer_is_not_called_for_a_while(contact, clock, error):
    contact.answered("one")
    assert contact.find() == "relay one"
    contact.failed(error)
    assert contact.find() == "the directory"
    for _ in range(2):  # the directory does not know
        contact.answered("one")
        assert contact.find() == "the directory"
    contact.answered("two")
    assert contact.find() == "relay two"
    contact.answered(None)
    clock.now += 10.0
    contact.answered("one")
    assert contact.find() == "relay one"


def test_a_relay_that_cannot_be_found_is_not_looked_for_at_each_call(contact, actors):
    del actors["one"]
    contact.answered("one")
    assert contact.find() == "the directory"
    actors["one"] = "relay one"
    contact.answered("one")
    assert contact.find() == "the directory"


def test_a_relay_stays_while_the_directory_is_slow_and_not_when_it_is_cut_off(contact):
    contact.answered("one")
    for _ in range(5):
        contact.failed(OF_DIRECTORY)
        assert contact.find() == "relay one"
    contact.failed(RayTaskError("follow", "", LinkError("the directory did not answer")).as_instanceof_cause())
    assert contact.find() == "the directory"
    contact.answered("one")  # so it has called
    assert contact.find() == "relay one"


def test_a_relay_with_a_fault_of_its_own_is_left(contact):
    contact.answered("one")
    contact.failed(RayTaskError("follow", "", KeyError("a mistake")).as_instanceof_cause())
    assert contact.find() == "the directory"
