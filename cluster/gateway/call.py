"""Records of a call, free of any wire format: what a client asks for, and the pieces of text it gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actors.messages import Acceptance, SpeculationStats
from cluster.generation import HTTP_TEMPERATURE, GenerationOptions
from cluster.text.text_codec import Prompt

HTTP_DEFAULTS = GenerationOptions(temperature=HTTP_TEMPERATURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """One call, perhaps for several answers: `n` to each prompt. Ranges are checked, the model's own limits not yet.

    `prompt_field` is what the client calls its prompt ("prompt", "messages", ...), for error messages.
    """

    prompts: tuple[Prompt, ...]
    prompt_field: str = "prompt"
    model: str | None = None  # None: whatever is served
    n: int = 1
    options: GenerationOptions = HTTP_DEFAULTS
    max_tokens_field: str = "max_tokens"
    stop: tuple[str, ...] = ()
    cache_salt: str = ""  # keeps what is learnt apart from the rest of the tenant's, or with policy group finds others
    wants_padding: bool | None = None  # of a stream's chunks; None: as the cluster does it
    wants_stats: bool = False
    prediction: str = ""  # what the caller thinks will come out
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class CallOrigin:
    """Where a call comes from, as far as its headers or metadata say."""

    request_id: str  # `x-request-id`, or made up here
    traceparent: str | None = None  # W3C Trace Context, unchecked
    tracestate: str | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the gateway must know of the target model."""

    name: str
    max_model_len: int  # tokens, prompt and answer together; the gateway goes by the router's, once it has told
    vocab_size: int  # token ids are below it
    eos_token_ids: tuple[int, ...]
    created: int = 0  # Unix seconds
    drafters: tuple[str, ...] = ()  # names of those that run, without auto and none
    acceptance: Acceptance = "coupled"
    max_side_len: int | None = None  # of an encoder-decoder model: tokens of prompt or answer alone


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one answer. The last piece of an answer has a finish reason; only it has the counts that follow."""

    choice: int  # prompt index * n + answer index
    text: str
    finish_reason: FinishReason | None = None
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt
    stats: SpeculationStats | None = None
