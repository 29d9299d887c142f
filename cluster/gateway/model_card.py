"""What clients are told of the served model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cluster.gateway.call import ServedModel


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


def capabilities(has_chat_template: bool) -> tuple[str, ...]:
    """Names of what can be asked of a model."""
    chat = ("chat",) if has_chat_template else ()
    return ("completion", *chat, "structured_outputs", "tokenize", "speculation")
