"""What of a model decides its size and speed, for well-known ones and for those of a local configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from actors.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers of one decoder-only model."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int  # tokens of prompt and output together
    num_parameters: int
    # Of the input embeddings: a token's row is looked up, the others are not read. 0 where the head uses them as well.
    num_lookup_parameters: int
    num_expert_parameters: int = 0  # of all experts that a router chooses from, all layers
    num_experts: int = 0  # in a layer
    experts_per_token: int = 0

    def read_parameters(self, rows: int) -> float:
        """Parameters that a forward of so many rows reads. Of experts only those that some row has chosen, as if each
        row chose evenly: a fraction 1 - (1 - k/E)^rows."""
        dense = self.num_parameters - self.num_lookup_parameters - self.num_expert_parameters
        if not self.num_experts:
            return float(dense)
        unread = (1.0 - self.experts_per_token / self.num_experts) ** rows
        return dense + self.num_expert_parameters * (1.0 - unread)

    @property
    def active_parameters(self) -> float:
        """Parameters that one row is multiplied with."""
        return self.read_parameters(1)

    def kv_bytes_per_token(self, number_bytes: float) -> float:
        """Keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * number_bytes


def _llama_like(
    name: str,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    vocab_size: int,
    max_context: int,
    *,
    head_dim: int = 128,
    is_tied: bool = False,
    num_experts: int = 0,
    experts_per_token: int = 0,
) -> ModelShape:
    """Grouped-query attention, gated MLP, RMS norms, no biases; intermediate_size is of one expert, where there are
    experts."""
    embedding = vocab_size * hidden_size
    attention = 2 * hidden_size * head_dim * (num_heads + num_kv_heads)
    mlp = 3 * hidden_size * intermediate_size
    experts = num_layers * num_experts * mlp
    layer = attention + 2 * hidden_size + (num_experts * hidden_size if num_experts else mlp)
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_context=max_context,
        num_parameters=num_layers * layer + experts + hidden_size + embedding * (1 if is_tied else 2),
        num_lookup_parameters=0 if is_tied else embedding,
        num_expert_parameters=experts,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
    )


MODELS: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _llama_like("smollm2", 30, 576, 9, 3, 1536, 49_152, 8192, head_dim=64, is_tied=True),
        _llama_like("llama-1b", 16, 2048, 32, 8, 8192, 128_256, 131_072, head_dim=64, is_tied=True),
        _llama_like("llama-3b", 28, 3072, 24, 8, 8192, 128_256, 131_072, is_tied=True),
        _llama_like("llama-8b", 32, 4096, 32, 8, 14_336, 128_256, 131_072),
        _llama_like("llama-70b", 80, 8192, 64, 8, 28_672, 128_256, 131_072),
        _llama_like("llama-405b", 126, 16_384, 128, 8, 53_248, 128_256, 131_072),
        _llama_like("mistral-7b", 32, 4096, 32, 8, 14_336, 32_768, 32_768),
        _llama_like("mixtral-8x7b", 32, 4096, 32, 8, 14_336, 32_000, 32_768, num_experts=8, experts_per_token=2),
        _llama_like("qwen3-0.6b", 28, 1024, 16, 8, 3072, 151_936, 40_960, is_tied=True),
        _llama_like("qwen3-1.7b", 28, 2048, 16, 8, 6144, 151_936, 40_960, is_tied=True),
        _llama_like("qwen3-4b", 36, 2560, 32, 8, 9728, 151_936, 40_960, is_tied=True),
        _llama_like("qwen3-8b", 36, 4096, 32, 8, 12_288, 151_936, 40_960),
        _llama_like("qwen3-14b", 40, 5120, 40, 8, 17_408, 151_936, 40_960),
        _llama_like("qwen3-32b", 64, 5120, 64, 8, 25_600, 151_936, 40_960),
        _llama_like("qwen3-30b-a3b", 48, 2048, 32, 4, 768, 151_936, 40_960, num_experts=128, experts_per_token=8),
        _llama_like("qwen3-235b-a22b", 94, 4096, 64, 4, 1536, 151_936, 40_960, num_experts=128, experts_per_token=8),
    )
}


def find_model(spec: str, field: str) -> ModelShape:
    """A known name, a model directory, or a config.json. Raises InvalidRequest, or ModelError for a configuration that
    cannot be used."""
    known = MODELS.get(spec.lower())
    if known is not None:
        return known
    path = Path(spec).expanduser()
    if path.name == "config.json":
        path = path.parent
    if (path / "config.json").is_file():
        from cluster.deploy.size.model_config import read_model_shape  # with it comes torch

        return read_model_shape(path, field)
    limit = (
        f"known models are {', '.join(MODELS)}; of others give a directory with a config.json, weights are not needed"
    )
    raise InvalidRequest(field, spec, limit)
