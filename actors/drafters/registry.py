"""Drafters by name. Every module beside this one is a CPU drafter named after its file, save those listed below.

Such a module offers `create_drafter(**options) -> CpuDrafter`; nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Literal

import actors.drafters
from actors.drafters._options import FIELD, checked_options
from actors.drafters.contract import CpuDrafter
from actors.errors import InvalidRequest
from actors.messages import Acceptance, DraftMethod
from cache_service.automata.automata_index import AutomataIndex

AUTO = "auto"
NONE = "none"
DRAFT_MODEL = "draft_model"
EAGLE = "eagle"  # the head beside the target
LOOKAHEAD = "lookahead"  # lookahead decoding on the target
OUROBOROS = "ouroboros"  # the same on the draft model
RETRIEVAL = "retrieval"
CACHE = "cache"  # what the cluster shares
SOFT_NGRAM = "soft_ngram"
TOKEN_RECYCLING = "token_recycling"


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A drafting method as configuration and router know it. The drafter itself is made where the source runs."""

    name: str
    place: Literal["router", "draft_worker", "target"]
    in_auto: bool = False  # part of "auto", where there is a draft model or a head to run it on
    drafts_under_rejection: bool = False  # sends the draft distributions that `acceptance: rejection` needs
    method: DraftMethod = "tree"  # asked of a draft worker


_MODEL_SOURCES = (
    DraftSource(EAGLE, "target", in_auto=True),
    DraftSource(OUROBOROS, "draft_worker", method="lookahead"),
    DraftSource(DRAFT_MODEL, "draft_worker", in_auto=True, drafts_under_rejection=True),
)

# The other CPU drafters find what one of these finds: prompt lookup what the suffix automaton does, the n-gram table
# and token recycling what the soft n-gram memory does. Two sources with the same knowledge make the planner
# overconfident. Lookahead must be named: its window takes rows in every round whether they pay or not, and where each
# further row costs as much as the first, they rarely do.
_IN_AUTO = frozenset({CACHE, "prediction", RETRIEVAL, SOFT_NGRAM, "suffix"})
_NOT_DRAFTERS = frozenset({"contract", "registry"})

CPU_DRAFTER_NAMES: tuple[str, ...] = tuple(
    sorted(
        module.name
        for module in pkgutil.iter_modules(actors.drafters.__path__)
        if module.name not in _NOT_DRAFTERS and not module.name.startswith("_")
    )
)
# All sources by name. Where several may draft for a sequence on its draft worker, the first one does.
SOURCES: Mapping[str, DraftSource] = MappingProxyType(
    {name: DraftSource(name, "router", in_auto=name in _IN_AUTO) for name in CPU_DRAFTER_NAMES}
    | {source.name: source for source in _MODEL_SOURCES}
)
DRAFTER_NAMES: tuple[str, ...] = (AUTO, NONE, *sorted(source.name for source in _MODEL_SOURCES), *CPU_DRAFTER_NAMES)


def create_drafter(name: str, **options: object) -> CpuDrafter:
    """A CPU drafter, its kernels compiled. Options are the drafter's own. Raises InvalidRequest for other names."""
    if name not in CPU_DRAFTER_NAMES:
        raise InvalidRequest("drafter", name, f"drafters of the router are {', '.join(CPU_DRAFTER_NAMES)}")
    drafter: CpuDrafter = _module_of(name).create_drafter(**options)
    return drafter


def _module_of(name: str) -> ModuleType:
    return importlib.import_module(f"actors.drafters.{name}")


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

    corpora: directories of `paceline corpus build`, for the drafter retrieval; tokenizer_fingerprint: the target's,
    None: unknown; index: of the shared cache, for the drafters that read it, None: there is none; delta_bytes: of
    soft_ngram, for what is to be shared, where its options do not say; options: of each drafter by its name, numbers
    may be text. Raises ModelError for a corpus that cannot be used, InvalidRequest for an option that a drafter does
    not have or whose value it refuses.
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


def check_options(
    names: Sequence[str], options: Mapping[str, Mapping[str, object]], field: str = FIELD
) -> dict[str, dict[str, object]]:
    """Options of drafters among expanded names, of their own types; ranges are for the drafters to check. Raises
    InvalidRequest naming what is below `field`."""
    checked = {}
    for name, given in options.items():
        if name not in CPU_DRAFTER_NAMES:
            raise InvalidRequest(field, name, f"drafters with options are {', '.join(CPU_DRAFTER_NAMES)}")
        if name not in names:
            raise InvalidRequest(f"{field}.{name}", dict(given), f"drafters must include {name} to use it")
        checked[name] = checked_options(f"{field}.{name}", _module_of(name).create_drafter, given)
    return checked


def _create_with(name: str, options: Mapping[str, object], given_by_engine: Mapping[str, object]) -> CpuDrafter:
    try:
        return create_drafter(name, **options, **given_by_engine)
    except ValueError as error:
        raise InvalidRequest(f"{FIELD}.{name}", dict(options), str(error)) from None


def needs_draft_model(names: Sequence[str]) -> bool:
    """Whether any of these expanded names runs on a draft model."""
    return any(SOURCES[name].place == "draft_worker" for name in names)


def expand_drafters(
    names: Sequence[str],
    *,
    has_draft_model: bool = True,
    has_head: bool = False,
    acceptance: Acceptance = "coupled",
    field: str = "drafters",
) -> tuple[str, ...]:
    """The distinct names of drafters that a configuration or request stands for, in order.

    () and ("none",) mean no speculation and give (). "auto" stands for CPU drafters that complement each other, and
    the head and the draft model where there are any. Raises InvalidRequest naming `field` for unknown names, for
    "none" beside others, and for names of which none can draft under `acceptance`.
    """
    for name in names:
        if name not in DRAFTER_NAMES:
            raise InvalidRequest(field, name, f"known drafters are {', '.join(DRAFTER_NAMES)}")
    if NONE in names:
        if set(names) != {NONE}:
            raise InvalidRequest(field, tuple(names), f"{NONE} excludes every other drafter")
        return ()
    can_draft = any(name == AUTO or SOURCES[name].drafts_under_rejection for name in names)
    if acceptance == "rejection" and names and not can_draft:
        limit = f"under acceptance 'rejection' only {DRAFT_MODEL} drafts; name it, alone or with others, or {NONE}"
        raise InvalidRequest(field, ", ".join(names), limit)
    is_there = {"router": True, "target": has_head, "draft_worker": has_draft_model}
    auto = [source.name for source in SOURCES.values() if source.in_auto and is_there[source.place]]
    return tuple(dict.fromkeys(part for name in names for part in (auto if name == AUTO else [name])))
