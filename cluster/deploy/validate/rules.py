"""The table of all rules: what each looks for, why it matters, how it is mended. docs/validate.md is made from it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

Level = Literal["error", "warning"]


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`says` is what must hold. A warning does not fail the command."""

    layer: Literal["Files", "Schemas", "Kubernetes", "Ray clusters", "serveConfigV2", "Cluster configurations"]
    level: Level = "error"
    says: str
    why: str
    fix: str


RULES = msgspec.toml.decode(Path(__file__).with_name("rules.toml").read_bytes(), type=dict[str, Rule])
