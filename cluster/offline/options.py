"""Keyword arguments of `LocalEngine`: short names of keys of a cluster's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from actors.errors import InvalidRequest
from cluster.config import ClusterConfig
from cluster.validation import first_problem

DEFAULT_BATCH_SIZE = 8

# The configuration keys that each keyword sets; docs/configuration.md describes them.
KEYS: Mapping[str, tuple[str, ...]] = {
    "acceptance": ("speculation.acceptance",),
    "batch_size": ("router.max_running",),
    "branch": ("draft.branch",),
    "corpora": ("speculation.corpora",),
    "device": ("target.device", "draft.device"),
    "draft_dtype": ("draft.dtype",),
    "draft_model": ("draft.model",),
    "draft_quantization": ("draft.quantization",),
    "drafter_options": ("speculation.drafter_options",),
    "drafters": ("speculation.drafters",),
    "dtype": ("target.dtype", "draft.dtype"),
    "eagle_depth": ("target.eagle_depth",),
    "eagle_head": ("target.eagle_head",),
    "eagle_top_k": ("target.eagle_top_k",),
    "exact": ("target.exact",),
    "gamma": ("draft.gamma",),
    "kv_cache_tokens": ("target.kv_cache_tokens", "draft.kv_cache_tokens"),
    "lookahead": ("draft.lookahead",),
    "max_draft_tokens": ("speculation.max_draft_tokens",),
    "max_rows": ("speculation.max_rows",),
    "quantization": ("target.quantization", "draft.quantization"),
}


def local_config(config: ClusterConfig | None, options: Mapping[str, object]) -> ClusterConfig:
    """The configuration, overridden by those options that are not None.

    Raises InvalidRequest naming the option if it is unknown or out of its limits.
    """
    data: dict[str, Any] = {"router": {"max_running": DEFAULT_BATCH_SIZE}}
    if config is not None:
        data = config.model_dump(exclude_unset=True)
    # Keywords that set two keys go first, so that `draft_dtype` overrides `dtype`.
    for name, value in sorted(options.items(), key=lambda option: -len(KEYS.get(option[0], ()))):
        if name not in KEYS:
            raise InvalidRequest(name, _plain(value), f"it must be one of {', '.join(KEYS)}", "unknown_parameter")
        for key in KEYS[name] if value is not None else ():
            section, _, field = key.partition(".")
            data.setdefault(section, {})[field] = _plain(value)
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        problem = first_problem(error)
        raise InvalidRequest(_option_of(problem.field), problem.value, problem.limit) from None


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump()
    return str(value) if isinstance(value, Path) else value


def _option_of(path: str) -> str:
    for option, keys in KEYS.items():
        for key in keys:
            if path == key or path.startswith((f"{key}.", f"{key}[")):
                return option + path.removeprefix(key)
    return path
