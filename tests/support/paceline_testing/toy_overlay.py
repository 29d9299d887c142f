"""A profile of the chart as this machine can run it: its own `serveConfigV2`, with toy models on CPUs."""

from collections.abc import Sequence
from pathlib import Path

from cluster.offline.engine import LocalEngine
from paceline_testing.ascii_model import speak_ascii
from paceline_testing.chart import Object, merged, profile_values
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
    profile: str, target: Path, draft: Path, router_pods: int | None = None, most_draft_pods: int | None = None
) -> Object:
    """Values of the chart: a profile's with other paths, sizes, devices and ports, and without the Secrets that nobody
    mounts here. The cache's name is nobody's here, too: routers do without. router_pods: None: as many as the profile
    has; most_draft_pods: None: none come or go."""
    http_port, grpc_port = free_ports(2)
    values = profile_values(profile)
    given = values["config"]
    gateways = given["gateway"].get("replicas", 1)
    config = {
        "target": {
            "model": str(target), "served_name": "tiny", "dtype": "float32", "tensor_parallel": 1,
            "kv_cache_tokens": _KV_TOKENS, "max_model_len": None, "eagle_head": "none",
        },
        "draft": {"model": str(draft), "dtype": "float32", "ahead": None, "max_workers": most_draft_pods or 1},
        "gateway": {"http_port": http_port, "grpc_port": grpc_port, "replicas": min(2, gateways)},
    }  # fmt: skip
    without_gpu = {"resources": {"limits": {"nvidia.com/gpu": None}, "requests": {"nvidia.com/gpu": None}}}
    router = {} if router_pods is None else {"minReplicas": router_pods}
    changed = {
        "config": config, "target": without_gpu, "draft": without_gpu, "router": router, "models": {"prepare": False},
        "podDisruptionBudgets": {"enabled": False}, "tenants": {"existingSecret": ""}, "cache": {"existingSecret": ""},
    }  # fmt: skip
    return merged(values, changed)


def questions(target: Path, unary_tokens: int, stream_tokens: int) -> dict[str, Sequence[Question]]:
    """For each kind of request, with the answers of one process without drafts."""
    prompts = [f"{word} and {word}, then again {word}" for word in _WORDS]
    engine = LocalEngine(str(target), drafters=("none",), device="cpu", kv_cache_tokens=_KV_TOKENS)
    answers = [answer.text for answer in engine.generate(prompts, max_new_tokens=stream_tokens, ignore_eos=True)]
    pairs = list(zip(prompts, answers, strict=True))
    unary = [Question(prompt, unary_tokens, answer[:unary_tokens]) for prompt, answer in pairs]
    streams = [Question(prompt, stream_tokens, answer) for prompt, answer in pairs]
    return {"HTTP": unary, "gRPC": unary, "HTTP stream": streams, "gRPC stream": streams}
