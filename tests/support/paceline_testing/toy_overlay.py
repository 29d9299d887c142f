"""An overlay as this machine can run it: its own `serveConfigV2`, with toy models on CPUs."""

from collections.abc import Sequence
from pathlib import Path

from cluster.deploy.profiles import OVERLAYS
from cluster.deploy.values import DeployValues
from cluster.offline.engine import LocalEngine
from paceline_testing.ascii_model import speak_ascii
from paceline_testing.free_ports import free_ports
from paceline_testing.served_load import Question
from paceline_testing.tiny_models import save_tiny_model

_KV_TOKENS = 16_384
_WORDS = ("oak", "elm", "ash", "fir", "yew", "box", "bay", "fig")


def toy_models(directory: Path) -> tuple[Path, Path]:
    """A target and a draft model."""
    shape = {"hidden_size": 96, "heads": 6, "kv_heads": 3, "max_positions": 2048}
    target = save_tiny_model(directory / "target", "llama", 5, layers=4, **shape)
    draft = save_tiny_model(directory / "draft", "llama", 5, layers=1, **shape)
    for model in (target, draft):
        speak_ascii(model)
    return target, draft


def toy_values(
    overlay: str, target: Path, draft: Path, router_pods: int | None = None, most_draft_pods: int | None = None
) -> DeployValues:
    """Different from the overlay's in paths, sizes, devices and ports, and without the Secrets that nobody mounts here.
    The cache's name is nobody's here, too: routers do without. router_pods: None: as many as the overlay has;
    most_draft_pods: None: none come or go."""
    http_port, grpc_port = free_ports(2)
    values = OVERLAYS[overlay].model_dump()
    values["model"] |= {"target": str(target), "draft": str(draft), "served_name": "tiny", "prepare": False}
    cpu = {"gpus": 0, "dtype": "float32"}
    values["target"] |= cpu | {"tensor_parallel": 1, "kv_cache_tokens": _KV_TOKENS, "max_model_len": None}
    values["draft"] |= cpu | {"max": most_draft_pods or values["draft"]["min"]}
    values["gateway"] |= {
        "http_port": http_port,
        "grpc_port": grpc_port,
        "replicas": min(2, values["gateway"]["replicas"]),
    }
    if router_pods is not None:
        values["router"] |= {"min": router_pods, "pods_that_stay": 0}
    for section in ("tenants", "cache"):
        values[section]["secret"] = None
    return DeployValues.model_validate(values)


def questions(target: Path, unary_tokens: int, stream_tokens: int) -> dict[str, Sequence[Question]]:
    """For each kind of request, with the answers of one process without drafts."""
    prompts = [f"{word} and {word}, then again {word}" for word in _WORDS]
    engine = LocalEngine(str(target), drafters=("none",), device="cpu", kv_cache_tokens=_KV_TOKENS)
    answers = [answer.text for answer in engine.generate(prompts, max_new_tokens=stream_tokens, ignore_eos=True)]
    pairs = list(zip(prompts, answers, strict=True))
    unary = [Question(prompt, unary_tokens, answer[:unary_tokens]) for prompt, answer in pairs]
    streams = [Question(prompt, stream_tokens, answer) for prompt, answer in pairs]
    return {"HTTP": unary, "gRPC": unary, "HTTP stream": streams, "gRPC stream": streams}
