"""Drafters are found by name, and a list of names becomes the drafters that it stands for."""

from inspect import signature

import pytest

from actors.drafters._match_options import MatchOptions
from actors.drafters._options import checked_options, option_names
from actors.drafters.registry import (
    CPU_DRAFTER_NAMES,
    DRAFTER_NAMES,
    _drafter_class,
    create_drafter,
    create_drafters,
    expand_drafters,
    most_successors,
)
from actors.errors import InvalidRequest, ModelError

# What requests and configurations may name, and `auto` stands for: every one is part of the interface.
CPU_DRAFTERS = (
    "cache",
    "grammar",
    "lookahead",
    "ngram_table",
    "prediction",
    "prompt_lookup",
    "retrieval",
    "soft_ngram",
    "suffix",
    "token_recycling",
)


def test_no_file_becomes_a_drafter_or_ceases_to_be_one_unnoticed() -> None:
    assert CPU_DRAFTER_NAMES == CPU_DRAFTERS
    assert DRAFTER_NAMES[:5] == ("auto", "none", "draft_model", "eagle", "ouroboros")
    assert DRAFTER_NAMES[5:] == CPU_DRAFTERS


@pytest.mark.parametrize("name", CPU_DRAFTER_NAMES)
def test_every_cpu_drafter_is_created_under_its_own_name_and_holds_nothing_for_sequences(name: str) -> None:
    drafter = create_drafter(name)
    assert drafter.name == name
    drafter.forget(123)
    drafter.observe([])
    assert drafter.propose([]) == []


def test_all_cpu_drafters_of_a_list_are_created_and_corpora_are_for_retrieval() -> None:
    names = expand_drafters(("auto",))
    drafters = create_drafters((*names, "eagle", "ouroboros"))
    assert list(drafters) == [name for name in names if name != "draft_model"]
    assert all(drafter.name == name for name, drafter in drafters.items())
    with pytest.raises(ModelError, match="there is no such directory"):
        create_drafters(("retrieval",), corpora=["/no/such/corpus"])
    with pytest.raises(InvalidRequest, match="drafters must include retrieval to use it"):
        create_drafters(("suffix",), corpora=["/no/such/corpus"])


def test_predictions_that_drafters_learn_from_are_told_without_making_them() -> None:
    for name in CPU_DRAFTER_NAMES:
        assert most_successors((name,)) == create_drafter(name).num_successors
    assert most_successors((*expand_drafters(("auto",)), "eagle")) == 8
    options = {"soft_ngram": {"successors": "2"}, "ngram_table": {"filler_top_k": 5}}
    for name, given in options.items():
        made = create_drafters((name,), options={name: given})
        assert most_successors((name,), {name: given}) == made[name].num_successors
    assert most_successors(tuple(options), options) == 5
    assert most_successors(()) == 0


def test_options_are_the_drafters_own_and_text_becomes_what_they_are() -> None:
    options = {
        "suffix": {"len_threshold": "5", "alpha": "2.5", "by_frequency": "true"},
        "ngram_table": {"n": 3, "levels": "one", "unknown": "random"},
        "token_recycling": {"tree": "static-60"},
    }
    drafters = create_drafters(tuple(options), options=options)
    assert drafters["suffix"]._match == MatchOptions(len_threshold=5, alpha=2.5)
    assert drafters["suffix"]._options.by_frequency is True
    assert len(drafters["token_recycling"]._shape[0]) == 60


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suffix": {"colour": 1}}, r"drafter_options.suffix.colour is 1; there is no such option; there are len_thr"),
        ({"suffix": {"top_k": "many"}}, r"drafter_options.suffix.top_k is 'many'; input should be a valid integer"),
        ({"prompt_lookup": {"max_ngram": 65}}, r"max_ngram is 65; it must be from 1 to 64"),
        ({"suffix": {"top_k": 0}}, r"drafter_options.suffix.top_k is 0; it must be from 1 to"),
        ({"cache": {"top_k": 9}}, r"drafter_options.cache.top_k is 9; it must be from 1 to 8"),
        ({"suffix": {"floor": "nan"}}, r"drafter_options.suffix.floor is 'nan'; it must be from 0 to 1"),
        ({"suffix": {"floor": 5}}, r"drafter_options.suffix.floor is 5; it must be from 0 to 1"),
        ({"suffix": {"alpha": 1e308}}, r"alpha is 1e\+308; it must be from 0 to 1000000"),
        ({"suffix": {"acceptance": [1.0]}}, r"there is no such option"),
        ({"retrieval": {"corpora": ["/etc"]}}, r"there is no such option"),
        ({"cache": {"index": "mine"}}, r"there is no such option"),
        ({"prediction": {"floor": 0.1}}, r"drafters must include prediction to use it"),
        ({"draft_model": {"gamma": 3}}, r"drafter_options is 'draft_model'; drafters with options are"),
        ({"token_recycling": {"tree": "/no/such/file"}}, r"/no/such/file"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_possible(options, message) -> None:
    with pytest.raises(InvalidRequest, match=message):
        create_drafters(("cache", "suffix", "prompt_lookup", "retrieval", "token_recycling"), options=options)


@pytest.mark.parametrize("name", CPU_DRAFTER_NAMES)
def test_every_option_of_every_drafter_takes_its_own_default(name: str) -> None:
    drafter = _drafter_class(name)
    defaults = {option: signature(drafter).parameters[option].default for option in option_names(drafter)}
    assert defaults
    assert checked_options("options", drafter, defaults) == defaults


@pytest.mark.parametrize(
    "name", ["medusa", "none", "auto", "draft_model", "eagle", "ouroboros", "contract", "registry", ""]
)
def test_only_cpu_drafters_can_be_created_and_the_error_names_them(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt_lookup.*suffix") as caught:
        create_drafter(name)
    assert caught.value.value == name


def test_auto_stands_for_what_completes_each_other_and_the_draft_model() -> None:
    wanted = ("cache", "grammar", "prediction", "retrieval", "soft_ngram", "suffix")
    assert expand_drafters(("auto",)) == (*wanted, "draft_model")
    assert expand_drafters(("auto",), has_draft_model=False) == wanted
    assert expand_drafters(("auto",), has_head=True) == (*wanted, "eagle", "draft_model")
    assert set(wanted) <= set(CPU_DRAFTER_NAMES)
    assert not {"lookahead", "ouroboros"} & {*wanted}  # their rows rarely pay: for those who name them


def test_names_keep_their_order_and_appear_once() -> None:
    assert expand_drafters(["suffix", "prompt_lookup", "suffix"]) == ("suffix", "prompt_lookup")
    assert expand_drafters(["draft_model", "auto"])[0] == "draft_model"
    assert sorted(expand_drafters(["suffix", "auto"])) == sorted(
        ("cache", "grammar", "prediction", "retrieval", "soft_ngram", "suffix", "draft_model")
    )


@pytest.mark.parametrize("names", [(), ("none",), ("none", "none")])
def test_none_and_nothing_mean_no_speculation(names: tuple[str, ...]) -> None:
    assert expand_drafters(names) == ()


def test_none_beside_another_drafter_is_an_error_that_names_the_field() -> None:
    with pytest.raises(InvalidRequest, match="none excludes") as caught:
        expand_drafters(("none", "suffix"), field="speculation.drafters")
    assert caught.value.field == "speculation.drafters"


@pytest.mark.parametrize("names", [("suffx",), ("auto", "contract"), ("SUFFIX",)])
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        expand_drafters(names)
    assert caught.value.value == names[-1]
    for known in DRAFTER_NAMES:
        assert known in str(caught.value)
