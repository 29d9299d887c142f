"""`paceline size`: memory and speed of a deployment, before anything is bought or started."""

from __future__ import annotations

import sys
import textwrap
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from actors.errors import MISSING, InvalidRequest
from cluster.cli.row_times import parse_row_times

if TYPE_CHECKING:
    from cluster.deploy.size.configured import Configured
    from cluster.deploy.size.estimate import Sizing

Dtype = Literal["float32", "bfloat16", "float16", "fp8", "int8", "int4"]
KvDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8"]
_WIDTH = 120
_FOR_GPUS = ("config", "draft", "eagle_head", "price_per_gpu_hour", "hardware")


def size(
    target: str = typer.Option(None, help="A known model, such as llama-70b, or a directory with a config.json."),
    config: Path = typer.Option(
        None, metavar="FILE", help="Judge this configuration of a cluster; options given beside it count more."
    ),
    gpus: str = typer.Option(None, metavar="NAME:NUMBER", help="GPUs that share the target, such as h200:8."),
    cpu: bool = typer.Option(False, "--cpu", help="Size this machine's CPU instead; its rates are measured first."),
    memory_gib: float = typer.Option(None, min=0.1, help="With --cpu: of another machine than this one."),
    bandwidth_gb_s: float = typer.Option(None, min=0.1, help="With --cpu: memory bandwidth, instead of measuring it."),
    dtype: Dtype = typer.Option(None, case_sensitive=False, help="Of the weights; bfloat16."),
    kv_dtype: KvDtype = typer.Option("auto", case_sensitive=False, help="Of the KV cache; auto: as computed."),
    concurrency: int = typer.Option(1, min=1, max=4096, help="Requests at once."),
    context: int = typer.Option(None, min=1, help="Cached tokens of a request, prompt and answer; 4096."),
    draft: str = typer.Option(None, help="A draft model, as --target, beside the drafters on the router's CPU."),
    draft_gpu: str = typer.Option(
        None,
        metavar="NAME[:NUMBER]",
        help="GPUs that share a draft model; by default one of the target's kind.",
    ),
    draft_dtype: Dtype = typer.Option(None, case_sensitive=False, help="Of the draft model's weights; bfloat16."),
    eagle_head: str = typer.Option(
        None, metavar="DIRECTORY", help="An EAGLE head beside the target; mtp: its own; assume: one of its width."
    ),
    max_draft_workers: int = typer.Option(8, min=1, max=64, help="Most draft workers that are tried."),
    acceptance: str = typer.Option(
        "",
        metavar="NUMBER,NAME=NUMBER,...",
        help="Probability that a guess is right, of models and head; 0.7, on the CPU 0.5. NAME: draft, more_drafts.X, "
        "head or cpu.",
    ),
    draft_tokens: int = typer.Option(None, min=1, max=64, help="A request and round; by default the best number."),
    draft_ahead: int = typer.Option(
        None, min=0, max=64, help="Outcomes that a worker drafts for ahead, draft.ahead; 8."
    ),
    hit_rate: float = typer.Option(
        None, min=0.0, max=1.0, help="Share of drafts made one round ahead that are used; 0.9."
    ),
    price_per_gpu_hour: float = typer.Option(None, min=1e-4, max=1e6, help="Of a target GPU, in any currency."),
    draft_price_per_gpu_hour: float = typer.Option(None, min=1e-4, max=1e6, help="Of a draft GPU; default the same."),
    efficiency: float = typer.Option(
        None, min=0.01, max=1.0, help="Share of the rates that is reached: 0.8 of data sheets, 1 of what is measured."
    ),
    link_ms: float = typer.Option(
        None, min=0.0, max=1000.0, help="A message from the router to a worker and back; 0.2."
    ),
    row_times: str = typer.Option(
        "", metavar="ROWS:MS,...", help="Measured forwards of the target, such as 1:5.2,32:5.9, for the roofline's."
    ),
    hardware: Path = typer.Option(None, metavar="FILE", help="YAML with further GPUs, or others of the same names."),
    output: Literal["text", "json"] = typer.Option("text", "--format"),
) -> None:
    """Whether a target fits, how fast it is with and without drafts, and how many draft workers pay. With --config,
    whether there is a better setting.

    The formulas are in docs/sizing.md. Exit status 1 if it does not fit.
    """
    asked = Namespace(**locals(), more_drafts={}, draft_ranks={})
    measured = parse_row_times(row_times)
    from cluster.cli.output import print_json
    from cluster.config import load_config
    from cluster.deploy.size.configured import fill_in, judged
    from cluster.deploy.size.estimate import sizing_of
    from cluster.deploy.size.options import deployment_of
    from cluster.deploy.size.report import as_json

    known = None if config is None else load_config(config)
    if known is not None:
        asked = fill_in(asked, known)
    _check(asked)
    sizing = sizing_of(deployment_of(asked, measured))
    configured = judged(sizing, known) if known is not None and sizing.memory.fits else None
    if output == "json":
        print_json(as_json(sizing, configured))
    else:
        _print(sizing, configured)
    if not sizing.memory.fits:
        sys.exit(1)


def _check(asked: Namespace) -> None:
    """Refuse options that mean nothing beside the others. Raises InvalidRequest."""
    if asked.target is None:
        raise InvalidRequest("--target", MISSING, "give --target, or --config")
    unpriced = asked.price_per_gpu_hour is None
    for applies, limit, names in (
        (
            asked.cpu,
            "it has no meaning with --cpu; leave it out",
            _FOR_GPUS,
        ),
        (not asked.cpu, "it has no meaning with --gpus; leave it out", ("memory_gib", "bandwidth_gb_s")),
        (asked.draft is None and not asked.more_drafts, "give --draft, too", ("draft_gpu", "draft_price_per_gpu_hour")),
        (unpriced, "give --price-per-gpu-hour, too", ("draft_price_per_gpu_hour",)),
    ):
        for name in names:
            if applies and (value := getattr(asked, name)) is not None:
                raise InvalidRequest(f"--{name.replace('_', '-')}", str(value), limit)
    if asked.cpu == (asked.gpus is not None):
        raise InvalidRequest("--gpus", asked.gpus, "give either --gpus or --cpu")


def _print(sizing: Sizing, configured: Configured | None) -> None:
    from cluster.cli.table import print_table
    from cluster.deploy.size.report import sections, settings

    for number, section in enumerate(sections(sizing, configured)):
        if number:
            print()
        if isinstance(section, str):
            print(textwrap.fill(section, _WIDTH, break_on_hyphens=False), flush=True)
        else:
            print_table(*section, sys.stdout)
    if chosen := settings(sizing):
        print("\nSettings of the cheapest:")
        for key, value in chosen.items():
            print(f"  --set {key}={value}")
