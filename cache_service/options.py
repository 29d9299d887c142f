"""The base of every options record: each component owns one record with its limits, and `cluster.config` nests them."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

KeepSeconds = Annotated[int, Field(ge=1, le=2**31)]
"""Time to live in Redis."""

PollSeconds = Annotated[float, Field(ge=0.001, le=60)]
"""Pause between two polls or retries."""


class Options(BaseModel):
    """Frozen and validated. Unknown keys, infinities and NaN are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans_as_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads yes and on as booleans, which pydantic would take for 1."""
        if isinstance(value, bool):
            kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"{value} is no number")
        return value


def _kinds(annotation: Any) -> set[Any]:
    inner = get_args(annotation)
    if inner:
        return set().union(*map(_kinds, inner))
    return {annotation} if isinstance(annotation, type) else set()
