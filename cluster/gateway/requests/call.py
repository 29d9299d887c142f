"""Records of a call without wire format: what a client asks for, and who asks."""

from __future__ import annotations

from dataclasses import dataclass

from actors.messages import ServiceClass
from cluster.generation import HTTP_TEMPERATURE, GenerationOptions
from cluster.text.chat_format import NO_TOOLS, ToolUse
from cluster.text.chat_template import TemplateOptions
from cluster.text.text_codec import ChatMessage, Prompt

HTTP_DEFAULTS = GenerationOptions(temperature=HTTP_TEMPERATURE)
DEFAULT_TEMPLATE = TemplateOptions()
MAX_CHOICES = 32  # prompts x n of one call


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
    num_given: int | None = None  # of the n answers to each prompt, the likeliest are given; None: all are
    options: GenerationOptions = HTTP_DEFAULTS
    max_tokens_field: str = "max_tokens"
    constraint_field: str = "structured_outputs"  # the client's name of `options.structured_outputs`
    stop: tuple[str, ...] = ()
    stop_field: str = "stop"
    shows_stop: bool = False  # the text ends with the stop string that ended it
    skip_special_tokens: bool = True  # in the text
    echo: bool = False  # the text begins with the prompt
    prompt_logprobs: int | None = None  # so many of the likeliest tokens in each place of the prompt, beside the text
    hides_answer: bool = False  # only the prompt is of interest
    cache_salt: str = ""  # separates a part of the tenant's namespace, or with policy group finds others
    wants_padding: bool | None = None  # pads the chunks of a stream; None: as configured
    wants_stats: bool = False
    wants_token_sources: bool = False
    wants_token_ids: bool = False
    prediction: str = ""  # the likely answer
    timeout_s: float | None = None
    service_class: ServiceClass | None = None  # None: its tenant's

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
