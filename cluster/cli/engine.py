"""Options of the local engine that several commands share, and the engine built from their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from actors.drafters.registry import DRAFTER_NAMES
from actors.errors import InvalidRequest
from actors.messages import Acceptance
from cluster.cli.progress import progress_bars
from cluster.generation import GenerationOptions, generation_options

if TYPE_CHECKING:
    from cluster.offline.engine import LocalEngine

MAX_GAMMA = 64


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of a command that loads models in its process."""

    model: Annotated[str, typer.Option(help="Prepared name, directory, GGUF file or Hugging Face id.")] = "smollm2"
    draft_model: Annotated[str, typer.Option(help="The same, or auto (the drafter built for the model), or none.")] = (
        "auto"
    )
    eagle_head: Annotated[
        str,
        typer.Option(metavar="DIR", help="An EAGLE-1, -2 or -3 head of the model, mtp (its own MTP head) or none."),
    ] = "none"
    corpus: Annotated[
        list[Path],
        typer.Option(
            metavar="DIR", help="An index of `paceline corpus build`, for the drafter retrieval; may be repeated."
        ),
    ] = field(default_factory=list)
    branch: Annotated[
        int, typer.Option(min=1, max=8, help="Candidates for each token of the draft model; 1: a chain, else a tree.")
    ] = 2
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(
            help="auto: 16 bits on a GPU; on a CPU float32, or bfloat16 where that is faster and the checkpoint's."
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "fp8", "int8", "int4"],
        typer.Option(help="Bits of the weights of linear layers, of model and draft model."),
    ] = "none"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto"
    exact: Annotated[
        Literal["default", "bitwise"], typer.Option(help="bitwise: drafts and batch cannot change a bit of the logits.")
    ] = "default"
    threads: Annotated[
        int | None, typer.Option(min=1, max=256, help="Torch threads; by default as many as there are cores.")
    ] = None

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of `LocalEngine`."""
        names = {option.name for option in fields(ModelOptions)} - {"corpus", "threads"}
        return {name: getattr(self, name) for name in names} | {"corpora": tuple(map(str, self.corpus))}

    def set_threads(self) -> None:
        import torch  # here, so that --help does not wait for it

        if self.threads is not None:
            torch.set_num_threads(self.threads)


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ModelOptions):
    """Options of a command that makes an engine in its process."""

    drafter: Annotated[str, typer.Option(help=f"Names, comma-separated: {', '.join(DRAFTER_NAMES)}.")] = "auto"
    drafter_option: Annotated[
        list[str],
        typer.Option(
            metavar="DRAFTER.OPTION=VALUE",
            help="As in suffix.len_threshold=5; may be repeated. A wrong one lists those that there are.",
        ),
    ] = field(default_factory=list)
    gamma: Annotated[
        int, typer.Option(min=1, max=MAX_GAMMA, help="Tokens ahead that the draft model drafts in a round.")
    ] = 4
    eagle_depth: Annotated[int, typer.Option(min=1, max=32, help="Levels of the tree that the head drafts.")] = 7
    eagle_top_k: Annotated[int, typer.Option(min=1, max=64, help="Nodes that it expands on each level.")] = 10
    acceptance: Annotated[
        Acceptance, typer.Option(help="rejection: drafts change sampled tokens, but not their distribution.")
    ] = "coupled"

    def settings(self) -> dict[str, Any]:
        """Raises InvalidRequest."""
        return ModelOptions.settings(self) | {
            "drafters": split_names(self.drafter),
            "drafter_options": parsed_drafter_options(self.drafter_option),
            "gamma": self.gamma,
            "eagle_depth": self.eagle_depth,
            "eagle_top_k": self.eagle_top_k,
            "acceptance": self.acceptance,
        }


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of a command that generates text; None: the default."""

    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="At least 1; by default 256, or what the model has room for.", show_default=False),
    ] = None
    temperature: Annotated[float, typer.Option(help="0 to 2; 0: the likeliest token.")] = 0.0
    top_p: Annotated[float, typer.Option(help="Above 0, up to 1; 1: off.")] = 1.0
    top_k: Annotated[int, typer.Option(help="0: off.")] = 0
    seed: Annotated[
        int | None,
        typer.Option(
            help="Prompt i is sampled with seed + i; by default 0, in a chat a new one every turn.", show_default=False
        ),
    ] = None

    def checked(self) -> GenerationOptions:
        """Raises InvalidRequest that names the option."""
        try:
            return generation_options(**asdict(self))
        except InvalidRequest as error:
            raise InvalidRequest(f"--{error.field.replace('_', '-')}", error.value, error.limit) from None


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


def local_engine(options: EngineOptions, batch_size: int) -> LocalEngine:
    """The engine that a command's options describe; models are prepared under progress bars. Raises ModelError or
    InvalidRequest."""
    from cluster.offline.engine import LocalEngine

    options.set_threads()
    with progress_bars() as progress:
        return LocalEngine(batch_size=batch_size, progress=progress, **options.settings())
