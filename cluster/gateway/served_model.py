"""The served model: its properties, and the part of them that clients see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the gateway knows of the target model."""

    name: str
    max_model_len: int  # tokens of prompt and answer together; replaced by the router's once known
    vocab_size: int  # token ids are below it
    eos_token_ids: tuple[int, ...]
    created: int = 0  # Unix seconds
    drafters: tuple[str, ...] = ()  # drafters that run, without auto and none
    tool_parser: str = "auto"  # how its chat template writes calls; auto: as the template shows
    max_requests: int | None = None  # that a router takes at a time, running and waiting; None: not known
    max_side_len: int | None = None  # encoder-decoder models: tokens of prompt or answer alone


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model, its limits and its abilities."""

    model: ServedModel
    max_new_tokens: int  # the most that a request may ask for
    capabilities: tuple[str, ...]

    def json_object(self) -> dict[str, Any]:
        """OpenAI's object, with more members."""
        return {
            "id": self.model.name,
            "object": "model",
            "created": self.model.created,
            "owned_by": "paceline",
            "max_model_len": self.model.max_model_len,
            "max_new_tokens": self.max_new_tokens,
            "max_requests": self.model.max_requests,
            "capabilities": list(self.capabilities),
            "drafters": list(self.model.drafters),
        }


def capabilities(has_chat_template: bool, scores_prompts: bool, fills_in: bool) -> tuple[str, ...]:
    """Names of what can be asked of a model: endpoints, then what answers can have."""
    chat = ("chat", "responses", "messages") if has_chat_template else ()
    tools = ("tools",) if has_chat_template else ()
    prompt_logprobs = ("prompt_logprobs",) if scores_prompts else ()
    suffix = ("suffix",) if fills_in else ()
    return (
        "completion", *suffix, *chat, "tokenize", *tools, "structured_outputs", "logprobs", *prompt_logprobs,
        "speculation",
    )  # fmt: skip
