"""EAGLE heads: one decoder layer that continues the target's hidden states.

EAGLE (Li et al. 2024, arXiv:2401.15077) and EAGLE-2 (Li et al. 2024, arXiv:2406.16858) share the published format of
a head that predicts the next hidden state, which the target's output layer turns into tokens. EAGLE-3 (Li et al. 2025,
arXiv:2503.01840) reads three hidden states of the target and has an output layer of its own, often for a reduced
vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from actors.engine.kv_cache import LayerShape
from actors.errors import ModelError
from actors.models.source import ModelSource

HeadKind = Literal["eagle", "eagle3"]

_PREFIXES = {"eagle": "layers.0.", "eagle3": "midlayer."}
_MIN_TARGET_LAYERS = 3  # EAGLE-3 reads the inputs of layers 2, L / 2 and L - 3
_BIASES = ("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias")
_VOCABULARY_KEYS = ("d2t", "t2d")
_IGNORED_ENDINGS = ("rotary_emb.inv_freq",)  # computed by the head itself


class HeadLayer(nn.Module):
    """The Llama decoder layer of a head.

    EAGLE: no norm before attention. EAGLE-3: attention reads the normed embedding beside the normed feature, 2h wide.
    """

    def __init__(self, config: LlamaConfig, kind: HeadKind) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, 0)
        if kind == "eagle3":
            for name in ("q_proj", "k_proj", "v_proj"):
                narrow = getattr(self.self_attn, name)
                wide = nn.Linear(2 * config.hidden_size, narrow.out_features, bias=narrow.bias is not None)
                setattr(self.self_attn, name, wide)
            self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, embeddings: Tensor | None, features: Tensor, rotary: tuple[Tensor, Tensor], attention: dict[str, Any]
    ) -> Tensor:
        """embeddings (None: EAGLE) and features [batch, rows, h] -> [batch, rows, h]."""
        attended = features
        if embeddings is not None:
            attended = torch.cat((self.input_layernorm(embeddings), self.hidden_norm(features)), dim=-1)
        hidden = features + self.self_attn(attended, position_embeddings=rotary, **attention)[0]
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class EagleHead(nn.Module):
    """A head of either kind. Row t takes the embedding of token t + 1 and the target's feature of position t. Its
    output predicts the feature of position t + 1, and replaces it in further drafting.

    EAGLE's feature is the target's last hidden state, the input of its output layer; EAGLE-3's is the concatenation of
    the inputs of the layers `feature_layers`.
    """

    draft_ids: Tensor | None  # int64 [Vd]: token of each output column; None: column c stands for token c

    def __init__(
        self,
        config: LlamaConfig,
        kind: HeadKind,
        num_target_layers: int,
        vocab_size: int | None,
        has_own_embedding: bool = False,
        has_bias: bool = False,
    ) -> None:
        """vocab_size: columns of an own output layer; None: the target's is used. has_bias: whether `fc` has a bias."""
        super().__init__()
        self.config = config
        self.kind: HeadKind = kind
        self.feature_layers: tuple[int, ...] | None = None
        if kind == "eagle3":
            self.feature_layers = (2, num_target_layers // 2, num_target_layers - 3)
        size = config.hidden_size
        self.fc = nn.Linear((3 if kind == "eagle3" else 2) * size, size, bias=has_bias)
        self.layer = HeadLayer(config, kind)
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if has_own_embedding else None
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps) if kind == "eagle3" else None
        self.lm_head = nn.Linear(size, vocab_size, bias=False) if vocab_size is not None else None
        self.register_buffer("draft_ids", None, persistent=False)
        with torch.device("cpu"):  # not on the meta device, unlike the weights
            self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(self, embeddings: Tensor, features: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """embeddings [batch, rows, h], positions int64 [batch, rows]; features are the target's, [batch, rows, h or
        3h], or earlier outputs of this head, [batch, rows, h]. Returns [batch, rows, h].

        attention: arguments of the attention function of `config`, such as `attention_mask`.
        """
        rotary = self.rotary_emb(embeddings, positions)
        attention.setdefault("attention_mask", None)
        if self.kind == "eagle3":
            if features.shape[-1] != embeddings.shape[-1]:
                features = self.fc(features)
            output: Tensor = self.layer(embeddings, features, rotary, attention)
            return output
        output = self.layer(None, self.fc(torch.cat((embeddings, features), dim=-1)), rotary, attention)
        return output

    def logits(self, hidden: Tensor, target_head: nn.Module) -> Tensor:
        """Logits [..., Vd] of outputs of `forward`. target_head: the target's output layer."""
        if self.norm is not None:
            hidden = self.norm(hidden)
        logits: Tensor = (target_head if self.lm_head is None else self.lm_head)(hidden)
        return logits

    @property
    def kv_shape(self) -> LayerShape:
        config = self.config
        return LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim, self.fc.weight.dtype)

    def kv_bytes_per_token(self) -> int:
        shape = self.kv_shape
        return shape.kv_heads * sum(shape.stored_dims) * shape.dtype.itemsize


def load_eagle_head(
    path: Path | str, target: PretrainedConfig, dtype: str = "float32", device: str = "cpu"
) -> EagleHead:
    """Load the head in directory `path` (config.json beside safetensors, or an older pytorch_model.bin) for a target.

    Keys `midlayer.*` mean EAGLE-3. Raises ModelError with file, key, shape and expected shape for anything missing,
    unknown or of another size.
    """
    path = Path(path)
    if not path.is_dir():
        raise ModelError(f"EAGLE head {str(path)!r}: there is no such directory")
    text = target.get_text_config()
    config = _read_config(path, text)
    tensors, files = _read_tensors(path)
    kind: HeadKind = "eagle3" if any(key.startswith(_PREFIXES["eagle3"]) for key in tensors) else "eagle"
    if kind == "eagle3" and text.num_hidden_layers < _MIN_TARGET_LAYERS:
        raise ModelError(
            f"EAGLE head {str(path)!r}: the target has {text.num_hidden_layers} layers; EAGLE-3 reads the inputs of "
            f"three, so at least {_MIN_TARGET_LAYERS} are needed"
        )
    vocabulary = {key: tensors.pop(key) for key in _VOCABULARY_KEYS if key in tensors}
    vocab_size = None
    if kind == "eagle3":
        vocab_size = _draft_vocab_size(path, config, tensors, vocabulary)
    elif vocabulary:
        raise ModelError(f"{files[next(iter(vocabulary))]}: key {next(iter(vocabulary))!r} belongs to EAGLE-3 alone")
    config.attention_bias = False
    with torch.device("meta"):
        head = EagleHead(
            config,
            kind,
            num_target_layers=text.num_hidden_layers,
            vocab_size=vocab_size,
            has_own_embedding="embed_tokens.weight" in tensors,
            has_bias="fc.bias" in tensors,
        )
        _add_biases(head, tensors, _PREFIXES[kind])
    _check_keys(path, head, tensors=tensors, files=files, prefix=_PREFIXES[kind])
    floats = getattr(torch, dtype)
    prefix = _PREFIXES[kind]
    state = {
        (f"layer.{key.removeprefix(prefix)}" if key.startswith(prefix) else key): value.to(device, floats)
        for key, value in tensors.items()
    }
    head.load_state_dict(state, assign=True)
    if "d2t" in vocabulary:
        assert vocab_size is not None
        head.draft_ids = _draft_ids(files["d2t"], vocabulary, vocab_size, text.vocab_size)
    return head.to(device).eval().requires_grad_(False)


def _read_config(path: Path, target: PretrainedConfig) -> LlamaConfig:
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{file}: there is no such file; it says of what shape the head is")
    data = ModelSource(str(path), path.name, path).read_json("config.json")
    for name in ("hidden_size", "vocab_size"):
        expected = getattr(target, name)
        if data.get(name) != expected:
            raise ModelError(f"{file}: {name} is {data.get(name)!r}; the target's is {expected}")
    # The published heads are Llama layers whatever the target is.
    data = {key: value for key, value in data.items() if key not in ("model_type", "architectures", "dtype")}
    try:
        config = LlamaConfig.from_dict(data)
        LlamaRotaryEmbedding(config)
    except Exception as error:
        raise ModelError(f"{file}: cannot be used: {' '.join(str(error).split())[:300]}") from None
    return config


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Path]]:
    """All tensors of the checkpoint, and the file of each."""
    from safetensors.torch import load_file

    weight_files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    if not weight_files:
        raise ModelError(f"EAGLE head {str(path)!r}: there is neither a .safetensors file nor a pytorch_model.bin")
    tensors: dict[str, Tensor] = {}
    files: dict[str, Path] = {}
    for file in weight_files:
        try:
            if file.suffix == ".safetensors":
                loaded = load_file(file)
            else:
                loaded = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ModelError(f"{file}: cannot be read: {' '.join(str(error).split())[:300]}") from None
        if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
            raise ModelError(f"{file}: holds something else than tensors by name")
        for key, value in loaded.items():
            if not key.endswith(_IGNORED_ENDINGS):
                tensors[key], files[key] = value, file
    return tensors, files


def _draft_vocab_size(
    path: Path, config: LlamaConfig, tensors: dict[str, Tensor], vocabulary: dict[str, Tensor]
) -> int:
    size = getattr(config, "draft_vocab_size", None) or config.vocab_size
    if size != config.vocab_size and "d2t" not in vocabulary:
        raise ModelError(
            f"{path / 'config.json'}: draft_vocab_size is {size} of {config.vocab_size}; the checkpoint lacks the key "
            "'d2t', which says what the columns stand for"
        )
    return int(size)


def _add_biases(head: EagleHead, tensors: dict[str, Tensor], prefix: str) -> None:
    """Add the attention biases of the checkpoint, whatever config.json says (Qwen2 has three of the four)."""
    attention = head.layer.self_attn
    for name in _BIASES:
        if f"{prefix}self_attn.{name}" in tensors:
            linear = getattr(attention, name.removesuffix(".bias"))
            linear.bias = nn.Parameter(torch.empty(linear.out_features))


def _check_keys(path: Path, head: EagleHead, tensors: dict[str, Tensor], files: dict[str, Path], prefix: str) -> None:
    expected = {
        (f"{prefix}{name.removeprefix('layer.')}" if name.startswith("layer.") else name): tuple(value.shape)
        for name, value in head.state_dict().items()
    }
    for key, shape in expected.items():
        if key not in tensors:
            raise ModelError(f"EAGLE head {str(path)!r}: key {key!r} of shape {list(shape)} is missing")
        if tuple(tensors[key].shape) != shape:
            raise ModelError(f"{files[key]}: key {key!r} has shape {list(tensors[key].shape)}; expected {list(shape)}")
        if not tensors[key].is_floating_point():
            raise ModelError(f"{files[key]}: key {key!r} is {tensors[key].dtype}; expected floating point")
    for key in tensors:
        if key not in expected:
            raise ModelError(f"{files[key]}: key {key!r} of shape {list(tensors[key].shape)} is unknown in such a head")


def _draft_ids(file: Path, vocabulary: dict[str, Tensor], draft_vocab_size: int, vocab_size: int) -> Tensor:
    """Token of each column. d2t int [Vd]: token less column; t2d bool [V]: whether a token has a column."""
    offsets, known = vocabulary["d2t"], vocabulary.get("t2d")
    is_integer = not (offsets.is_floating_point() or offsets.dtype == torch.bool)
    if tuple(offsets.shape) != (draft_vocab_size,) or not is_integer:
        raise ModelError(
            f"{file}: key 'd2t' has shape {list(offsets.shape)} of {offsets.dtype}; expected [{draft_vocab_size}] of "
            "integers"
        )
    ids = offsets.to(torch.int64) + torch.arange(len(offsets))
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise ModelError(f"{file}: key 'd2t' leads to tokens {int(ids.min())} to {int(ids.max())} of {vocab_size}")
    if len(ids.unique()) != len(ids):
        raise ModelError(f"{file}: key 'd2t' leads two columns to the same token")
    if known is not None:
        expected = torch.zeros(vocab_size, dtype=torch.bool)
        expected[ids] = True
        if tuple(known.shape) != (vocab_size,) or not torch.equal(known.bool(), expected):
            raise ModelError(
                f"{file}: key 't2d' of shape {list(known.shape)} does not mark the tokens of 'd2t'; "
                f"expected shape [{vocab_size}]"
            )
    return ids
