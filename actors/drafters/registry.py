"""Drafters by name. Every module of this package is a CPU drafter named after its file, except those listed below.

`soft_ngram.py` has the class `SoftNgramDrafter`, whose keywords are its options, and so on. A module is imported when
its drafter is created.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Literal

import actors.drafters
from actors.drafters._options import FIELD, checked_options
from actors.drafters.contract import CpuDrafter
from actors.errors import InvalidRequest
from actors.messages import DraftMethod
from actors.pool_names import FIRST_POOL

if TYPE_CHECKING:
    from cache_service.automata.automata_index import AutomataIndex

AUTO = "auto"
NONE = "none"
DRAFT_MODEL = "draft_model"
EAGLE = "eagle"  # the head beside the target
LOOKAHEAD = "lookahead"  # lookahead decoding on the target
OUROBOROS = "ouroboros"  # the same on the draft model
RETRIEVAL = "retrieval"
CACHE = "cache"  # the shared cache
GRAMMAR = "grammar"  # for constrained answers
SOFT_NGRAM = "soft_ngram"
TOKEN_RECYCLING = "token_recycling"


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A drafting method as configuration and router know it. The drafter is created where the source runs."""

    name: str
    place: Literal["router", "draft_worker", "target"]
    in_auto: bool = False  # part of "auto", if there is a draft model or head that it needs
    # Its part in `acceptance: rejection`. chain: draws tokens and sends the distributions. tree: its tokens follow from
    # the text, so their distributions are point masses.
    under_rejection: Literal["chain", "tree"] = "tree"
    method: DraftMethod = "tree"  # for a source on a draft worker


_MODEL_SOURCES = (
    DraftSource(EAGLE, "target", in_auto=True),
    DraftSource(OUROBOROS, "draft_worker", method="lookahead"),
    DraftSource(DRAFT_MODEL, "draft_worker", in_auto=True, under_rejection="chain"),
)

# Prompt lookup has the same knowledge as the suffix automaton, the n-gram table and token recycling the same as
# soft_ngram; two sources with the same knowledge make the planner overconfident. Lookahead takes rows in every round
# whether they pay or not, and where each further row costs as much as the first, they rarely do.
_IN_AUTO = frozenset({CACHE, GRAMMAR, "prediction", RETRIEVAL, SOFT_NGRAM, "suffix"})
_NOT_DRAFTERS = frozenset({"contract", "registry"})

CPU_DRAFTER_NAMES: tuple[str, ...] = tuple(
    sorted(
        module.name
        for module in pkgutil.iter_modules(actors.drafters.__path__)
        if module.name not in _NOT_DRAFTERS and not module.name.startswith("_")
    )
)
# All sources by name, without those of further pools. If several of a sequence's sources are on one pool of draft
# workers, the first one drafts.
SOURCES: Mapping[str, DraftSource] = MappingProxyType(
    {name: DraftSource(name, "router", in_auto=name in _IN_AUTO) for name in CPU_DRAFTER_NAMES}
    | {source.name: source for source in _MODEL_SOURCES}
)
DRAFTER_NAMES: tuple[str, ...] = (AUTO, NONE, *sorted(source.name for source in _MODEL_SOURCES), *CPU_DRAFTER_NAMES)


def source_of_pool(pool: str) -> str:
    """Name of the source that a pool of draft workers serves."""
    return DRAFT_MODEL if pool == FIRST_POOL else f"{DRAFT_MODEL}.{pool}"


def pools_of(names: Sequence[str]) -> tuple[str, ...]:
    """The pools beside the first of which these drafters name the source."""
    prefix = source_of_pool("")
    return tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def source_named(name: str) -> DraftSource | None:
    """The source of that name, also of a further pool of draft workers; None: there can be none."""
    if pools_of((name,)):
        return replace(SOURCES[DRAFT_MODEL], name=name)
    return SOURCES.get(name)


def create_drafter(name: str, **options: object) -> CpuDrafter:
    """A CPU drafter with compiled kernels. Raises InvalidRequest for names of no CPU drafter."""
    if name not in CPU_DRAFTER_NAMES:
        raise InvalidRequest("drafter", name, f"drafters of the router are {', '.join(CPU_DRAFTER_NAMES)}")
    return _drafter_class(name)(**options)


def _module_of(name: str) -> ModuleType:
    return importlib.import_module(f"actors.drafters.{name}")


def _drafter_class(name: str) -> type[CpuDrafter]:
    drafter: type[CpuDrafter] = getattr(_module_of(name), f"{name.title().replace('_', '')}Drafter")
    return drafter


def create_drafters(
    names: Sequence[str],
    *,
    corpora: Sequence[str | os.PathLike[str]] = (),
    tokenizer_fingerprint: str | None = None,
    index: AutomataIndex | None = None,
    delta_bytes: int = 0,
    options: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
) -> dict[str, CpuDrafter]:
    """The CPU drafters among expanded names, by name.

    corpora: directories made by `paceline corpus build`, for retrieval. tokenizer_fingerprint: the target's; None:
    unknown. index: the shared cache, if there is one. delta_bytes: default of soft_ngram's option. options: by drafter;
    numbers may be text. Raises ModelError for a corpus that cannot be used, and InvalidRequest for an unknown option or
    a wrong value.
    """
    checked = check_options(names, options)
    if corpora and RETRIEVAL not in names:
        raise InvalidRequest("corpora", str(corpora[0]), f"drafters must include {RETRIEVAL} to use it")
    given_by_engine: dict[str, dict[str, object]] = {
        name: {"index": index} for name in (CACHE, LOOKAHEAD, TOKEN_RECYCLING)
    }
    if corpora:
        given_by_engine[RETRIEVAL] = {"automata": _module_of(RETRIEVAL).open_corpora(corpora, tokenizer_fingerprint)}
    if delta_bytes and SOFT_NGRAM in names:
        checked[SOFT_NGRAM] = {"delta_bytes": delta_bytes, **checked.get(SOFT_NGRAM, {})}
    return {
        name: _create_with(name, checked.get(name, {}), given_by_engine.get(name, {}))
        for name in names
        if name in CPU_DRAFTER_NAMES
    }


def most_successors(names: Sequence[str], options: Mapping[str, Mapping[str, object]] = MappingProxyType({})) -> int:
    """Predictions of each row that CPU drafters among expanded names learn from, told without making them. options: as
    for `create_drafters`."""
    checked = check_options(names, options)
    classes = {name: _drafter_class(name) for name in names if name in CPU_DRAFTER_NAMES}
    wanted = [checked.get(name, {}).get(kind.successors_option, kind.num_successors) for name, kind in classes.items()]
    return max([count for count in wanted if isinstance(count, int)], default=0)


def check_options(
    names: Sequence[str], options: Mapping[str, Mapping[str, object]], field: str = FIELD
) -> dict[str, dict[str, object]]:
    """Options of drafters among expanded names, converted to their types.

    Raises InvalidRequest with the option's name below `field`.
    """
    checked = {}
    for name, given in options.items():
        if name not in CPU_DRAFTER_NAMES:
            raise InvalidRequest(field, name, f"drafters with options are {', '.join(CPU_DRAFTER_NAMES)}")
        if name not in names:
            raise InvalidRequest(f"{field}.{name}", dict(given), f"drafters must include {name} to use it")
        checked[name] = checked_options(f"{field}.{name}", _drafter_class(name), given)
    return checked


def _create_with(name: str, options: Mapping[str, object], given_by_engine: Mapping[str, object]) -> CpuDrafter:
    try:
        return create_drafter(name, **options, **given_by_engine)
    except ValueError as error:
        raise InvalidRequest(f"{FIELD}.{name}", dict(options), str(error)) from None


def needs_draft_model(names: Sequence[str]) -> bool:
    """Whether any of these expanded names runs on a draft model."""
    return any(source is not None and source.place == "draft_worker" for source in map(source_named, names))


def expand_drafters(
    names: Sequence[str],
    *,
    has_draft_model: bool = True,
    has_head: bool = False,
    pools: Sequence[str] = (),
    field: str = "drafters",
) -> tuple[str, ...]:
    """The distinct drafters that a configuration or request names, in order.

    () and ("none",) mean no speculation and give (). "auto" stands for CPU drafters that complement each other, and
    the head and the draft models if they exist. pools: names of the pools of draft workers beside the first. Raises
    InvalidRequest naming `field` for unknown names, and for "none" beside others.
    """
    of_pools = tuple(map(source_of_pool, pools))
    for name in names:
        if name not in DRAFTER_NAMES and name not in of_pools:
            raise InvalidRequest(field, name, f"known drafters are {', '.join((*DRAFTER_NAMES, *of_pools))}")
    if NONE in names:
        if set(names) != {NONE}:
            raise InvalidRequest(field, ", ".join(names), f"{NONE} excludes every other drafter")
        return ()
    is_there = {"router": True, "target": has_head, "draft_worker": has_draft_model}
    auto = [source.name for source in SOURCES.values() if source.in_auto and is_there[source.place]]
    auto += of_pools
    return tuple(dict.fromkeys(part for name in names for part in (auto if name == AUTO else [name])))
