"""Where experiments run: the device, the models that are made on it, and its clock."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.options import AttentionBackend

BLOCK = 16
_ROPE = {"max_position_embeddings": 131_072, "rope_theta": 500_000.0}
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
           "num_hidden_layers": 32, "vocab_size": 128_256},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
           "num_hidden_layers": 16, "vocab_size": 128_256},
    # What one of eight ranks has of a 70B: an eighth of the heads and of the feed-forward part.
    "70B/8": {"hidden_size": 8192, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 1,
              "num_hidden_layers": 80, "head_dim": 128, "vocab_size": 16_032},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
            "num_hidden_layers": 80, "vocab_size": 128_256},
}  # fmt: skip
_DRY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "vocab_size": 256, "head_dim": 16}  # fmt: skip


class Times(NamedTuple):
    """Milliseconds."""

    median: float
    least: float


class Setting:
    def __init__(self, is_dry: bool) -> None:
        self.is_dry = is_dry
        self.device = torch.device("cpu" if is_dry else "cuda")
        self.dtype = torch.float32 if is_dry else torch.bfloat16  # the interpreter keeps bfloat16 as bits
        torch.set_num_threads(1)

    def of(self, real: Any, dry: Any) -> Any:
        return dry if self.is_dry else real

    def config(self, name: str, **changes: Any) -> LlamaConfig:
        shape = _DRY if self.is_dry else SHAPES[name]
        return LlamaConfig(**_ROPE, **(shape | changes))

    def model(self, name: str, dtype: torch.dtype | None = None, **changes: Any) -> PreTrainedModel:
        """A Llama of random weights, made on the device."""
        generator = torch.Generator(self.device).manual_seed(1)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.config(name, **changes), dtype=dtype or self.dtype)
        inv_freq = _rotary_frequencies(model.config)
        model = model.to_empty(device=self.device).eval().requires_grad_(False)
        for name_, parameter in model.named_parameters():
            if name_.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
        for module_name, buffer in model.named_buffers():
            if module_name.endswith("inv_freq"):
                buffer.copy_(inv_freq)
        model.tie_weights()
        return model

    def engine(
        self,
        model: PreTrainedModel,
        tokens: int,
        attention: AttentionBackend = "triton_tree",
        is_eager: bool = True,
    ) -> TargetEngine:
        """tokens: that the KV cache has room for."""
        options = EngineOptions(-(-tokens // BLOCK) + 1, BLOCK, attention=attention, is_eager=is_eager)
        return TargetEngine(model, options)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def time(self, launch: Callable[[], object], repeats: int = 20, warm: int = 3) -> Times:
        """Of what is launched, by the device's clock. Launches are recorded and replayed where they can be, so that
        the host's time for them does not count."""
        if self.is_dry:
            repeats, warm = 2, 1
        for _ in range(warm):
            launch()
        if self.device.type != "cuda":
            return self.wall(launch, repeats, warm=0)
        replay = _recorded(launch)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in events:
            begin.record()
            replay()
            end.record()
        torch.cuda.synchronize()
        milliseconds = [begin.elapsed_time(end) for begin, end in events]
        return Times(statistics.median(milliseconds), min(milliseconds))

    def wall(self, work: Callable[[], object], repeats: int = 20, warm: int = 3) -> Times:
        """By the host's clock, until the device is done."""
        if self.is_dry:
            repeats, warm = 2, min(warm, 1)
        for _ in range(warm):
            work()
        milliseconds = []
        for _ in range(repeats):
            self.synchronize()
            started = time.perf_counter()
            work()
            self.synchronize()
            milliseconds.append((time.perf_counter() - started) * 1e3)
        return Times(statistics.median(milliseconds), min(milliseconds))

    def release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _recorded(launch: Callable[[], object]) -> Callable[[], object]:
    """A function that launches the same, as a graph unless it cannot be one."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            launch()
    except RuntimeError:
        torch.cuda.synchronize()
        return launch
    graph.replay()
    return graph.replay


def _rotary_frequencies(config: LlamaConfig) -> torch.Tensor:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    found: torch.Tensor = LlamaRotaryEmbedding(config).inv_freq
    return found
