"""Options of the local engine that several commands share, and the engine built from their values."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actors.errors import InvalidRequest
from cluster.cli.progress import progress_bars

if TYPE_CHECKING:
    from cluster.offline.engine import LocalEngine


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Quantization(StrEnum):
    none = "none"
    int8 = "int8"
    int4 = "int4"


class Exact(StrEnum):
    default = "default"
    bitwise = "bitwise"


class AcceptanceRule(StrEnum):
    coupled = "coupled"
    rejection = "rejection"


ModelOption = Annotated[str, typer.Option(help="Prepared name, directory, GGUF file or Hugging Face id.")]
DraftModelOption = Annotated[str, typer.Option(help="The same, or auto (the drafter built for the model), or none.")]
MAX_GAMMA = 64
GammaOption = Annotated[
    int, typer.Option(min=1, max=MAX_GAMMA, help="Tokens ahead that the draft model drafts in a round.")
]
BranchOption = Annotated[int, typer.Option(min=1, max=8, help="Candidates for each of them; 1: a chain, else a tree.")]
EagleHeadOption = Annotated[str, typer.Option(metavar="DIR", help="An EAGLE-1, -2 or -3 head of the model, or none.")]
EagleDepthOption = Annotated[int, typer.Option(min=1, max=32, help="Levels of the tree that the head drafts.")]
EagleTopKOption = Annotated[int, typer.Option(min=1, max=64, help="Nodes that it expands on each level.")]
QuantizationOption = Annotated[
    Quantization, typer.Option(help="Bits of the weights of linear layers, of model and draft model.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")]
CorpusOption = Annotated[
    list[Path],
    typer.Option(
        metavar="DIR", help="An index of `paceline corpus build`, for the drafter retrieval; may be repeated."
    ),
]
AcceptanceOption = Annotated[
    AcceptanceRule,
    typer.Option(help="rejection: drafts change sampled tokens, but not their distribution."),
]
ExactOption = Annotated[Exact, typer.Option(help="bitwise: drafts and batch cannot change a bit of the logits.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Torch threads; by default as many as there are cores.")]
DrafterOptionOption = Annotated[
    list[str],
    typer.Option(
        "--drafter-option",
        metavar="DRAFTER.OPTION=VALUE",
        help="As in suffix.len_threshold=5; may be repeated. A wrong one lists those that there are.",
    ),
]


def split_names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parsed_drafter_options(settings: Sequence[str]) -> dict[str, dict[str, object]]:
    """Parse DRAFTER.OPTION=VALUE into nested mappings; values stay text. Raises InvalidRequest."""
    options: dict[str, dict[str, object]] = {}
    for setting in settings:
        path, equals, value = setting.partition("=")
        drafter, dot, option = path.partition(".")
        if not (equals and dot and drafter and option):
            raise InvalidRequest("--drafter-option", setting, "it must be DRAFTER.OPTION=VALUE")
        options.setdefault(drafter.strip(), {})[option.strip()] = value.strip()
    return options


def local_engine(
    *, model: str, drafter: str, drafter_options: Sequence[str], threads: int | None, **options: Any
) -> LocalEngine:
    """An engine with the command line's values; models are prepared under progress bars.

    drafter: comma-separated names. options: any others of `cluster.offline.options.KEYS`, enums by their values.
    Raises ModelError or InvalidRequest.
    """
    import torch  # here, so that --help does not wait for it

    from cluster.offline.engine import LocalEngine

    if threads is not None:
        torch.set_num_threads(threads)
    plain: dict[str, Any] = {
        name: value.value if isinstance(value, StrEnum) else value for name, value in options.items()
    }
    with progress_bars() as progress:
        return LocalEngine(
            model,
            drafters=split_names(drafter),
            drafter_options=parsed_drafter_options(drafter_options),
            progress=progress,
            **plain,
        )
