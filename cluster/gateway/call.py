"""Records of a call without wire format: what a client asks for, and the pieces of text it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from actors.messages import Acceptance, SpeculationStats
from cluster.gateway.logprobs import TokenScore
from cluster.generation import HTTP_TEMPERATURE, GenerationOptions
from cluster.text.chat_format import NO_TOOLS, ToolUse
from cluster.text.chat_template import TemplateOptions
from cluster.text.text_codec import ChatMessage, Prompt

HTTP_DEFAULTS = GenerationOptions(temperature=HTTP_TEMPERATURE)
DEFAULT_TEMPLATE = TemplateOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """One call for `n` answers to each prompt. Ranges are checked, the model's own limits not yet.

    prompt_field: the client's name of the prompt ("prompt", "messages", ...), for errors.
    """

    prompts: tuple[Prompt, ...]
    prompt_field: str = "prompt"
    add_special_tokens: bool = True  # to prompts that are text, as the tokenizer does
    template: TemplateOptions = DEFAULT_TEMPLATE  # for prompts that are messages, as is the next
    tool_use: ToolUse = NO_TOOLS
    model: str | None = None  # None: the served model
    n: int = 1
    options: GenerationOptions = HTTP_DEFAULTS
    max_tokens_field: str = "max_tokens"
    constraint_field: str = "structured_outputs"  # the client's name of `options.structured_outputs`
    stop: tuple[str, ...] = ()
    stop_field: str = "stop"
    shows_stop: bool = False  # the text ends with the stop string that ended it
    skip_special_tokens: bool = True  # in the text
    echo: bool = False  # the text begins with the prompt
    hides_answer: bool = False  # only the prompt is of interest
    cache_salt: str = ""  # separates a part of the tenant's namespace, or with policy group finds others
    wants_padding: bool | None = None  # pads the chunks of a stream; None: as configured
    wants_stats: bool = False
    wants_token_sources: bool = False
    wants_token_ids: bool = False
    prediction: str = ""  # the likely answer
    timeout_s: float | None = None

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is messages, and the answer the next one."""
        prompt = self.prompts[0]
        return isinstance(prompt, tuple) and isinstance(prompt[0], ChatMessage)


@dataclass(frozen=True, slots=True)
class CallOrigin:
    """Request id and trace context from headers or metadata."""

    request_id: str  # `x-request-id`, or generated
    traceparent: str | None = None  # W3C Trace Context, unchecked
    tracestate: str | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the gateway knows of the target model."""

    name: str
    max_model_len: int  # tokens of prompt and answer together; replaced by the router's once known
    vocab_size: int  # token ids are below it
    eos_token_ids: tuple[int, ...]
    created: int = 0  # Unix seconds
    drafters: tuple[str, ...] = ()  # drafters that run, without auto and none
    acceptance: Acceptance = "coupled"
    tool_parser: str = "auto"  # how its chat template writes calls; auto: as the template shows
    max_requests: int | None = None  # that a router takes at a time, running and waiting; None: not known
    max_side_len: int | None = None  # encoder-decoder models: tokens of prompt or answer alone


FinishReason = Literal["stop", "length"]
TokenSource = tuple[str, str]  # text of a token, and who proposed it: a drafter's name or "target"


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one answer. The last piece of an answer has a finish reason, and only it has cached tokens and
    statistics."""

    choice: int  # prompt index * n + answer index
    text: str
    finish_reason: FinishReason | None = None
    num_completion_tokens: int = 0  # of the answer so far
    stop_string: str | None = None  # that ended the answer
    num_cached_tokens: int = 0  # prompt tokens from the prefix cache
    stats: SpeculationStats | None = None
    token_sources: tuple[TokenSource, ...] = ()  # of `text`, where the call wants them; every piece has its own
    token_ids: tuple[int, ...] = ()  # new ones, where the call wants them
    scores: tuple[TokenScore, ...] = ()  # of new tokens, where the call wants them; of a prompt that is echoed, too


def joined(pieces: Sequence[Piece]) -> Piece:
    """Consecutive pieces of one answer, at least one, as one."""
    if len(pieces) == 1:
        return pieces[0]
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_sources=tuple(pair for piece in pieces for pair in piece.token_sources),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        scores=tuple(score for piece in pieces for score in piece.scores),
    )
