"""The options of one generation and their limits, for the local engine, HTTP, gRPC and the command line alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Annotated

from pydantic import Field

from actors.errors import InvalidRequest, Size
from actors.messages import Acceptance, CacheUse, SamplingParams
from cluster.constraints.structured_outputs import StructuredOutputs
from cluster.validation import StrictFields, Whole, checked, counted, shown

# Defaults that depend on where a generation is asked for: OpenAI's API samples, the local engine is greedy.
HTTP_TEMPERATURE = 1.0
LOCAL_TEMPERATURE = 0.0
LOCAL_NEW_TOKENS = 256

NumNewTokens = Annotated[int, Field(ge=1), Whole]
MaxDraftTokens = Annotated[int, Field(ge=0, le=256), Whole]
NumLogprobs = Annotated[int, Field(ge=0, le=20), Whole]
LogitBias = Annotated[float, Field(ge=-100, le=100)]


class SamplingFields(StrictFields):
    """How tokens are drawn. None: the default."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31), Whole] | None = None  # 0 and -1: off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), Whole] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=128, strict=False), Whole] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None


class GenerationOptions(SamplingFields):
    """Everything that can be chosen for a generation besides its prompt. None: the default."""

    # None: LOCAL_NEW_TOKENS, or the gateway's `default_max_tokens`, or what the model has room for.
    max_new_tokens: NumNewTokens | None = None
    logit_bias: Annotated[tuple[tuple[int, LogitBias], ...], Field(strict=False)] = ()  # (token id, added to its logit)
    ignore_eos: bool = False
    drafters: Annotated[tuple[str, ...], Field(strict=False)] | None = None  # None: all that run; (): no drafts
    max_draft_tokens: MaxDraftTokens | None = None  # a round; None: as many as the planner chooses
    structured_outputs: StructuredOutputs | None = None  # what the answer must follow
    logprobs: NumLogprobs | None = None  # number of alternatives for each token; 0: only its own; None: none
    prompt_logprobs: NumLogprobs | None = None  # the same for prompt tokens
    namespace: str = ""  # learnt statistics are shared only within a namespace
    cache: CacheUse = "read_write"  # whether to draft from the shared cache, and add to it

    @property
    def num_logprobs(self) -> int:
        """As in `GenerationRequest`, as is the next."""
        return -1 if self.logprobs is None else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int:
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    def sampling(self, seed: int, acceptance: Acceptance = "coupled") -> SamplingParams:
        """seed: in place of the options' own, which is that of the first answer. Any integer."""
        return SamplingParams(
            seed=seed % 2**64,
            temperature=_or(self.temperature, LOCAL_TEMPERATURE),
            top_k=max(0, self.top_k or 0),
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            logit_bias=self.logit_bias,
            acceptance=acceptance,
        )


def generation_options(**fields: object) -> GenerationOptions:
    """Raises InvalidRequest that names the first wrong field, its value and the limit."""
    return checked(GenerationOptions, fields)


def changed(options: GenerationOptions | None, changes: Mapping[str, object]) -> GenerationOptions:
    """The options with some fields replaced. None: the defaults. Raises InvalidRequest."""
    if options is None:
        return checked(GenerationOptions, changes)
    return checked(GenerationOptions, {**options.model_dump(), **changes}) if changes else options


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidRequest."""
    for token in token_ids:
        # The first comparison is that of a prompt of many thousand plain integers.
        if type(token) is not int and (isinstance(token, bool) or not isinstance(token, Integral)):
            raise InvalidRequest(field, shown(token), "token ids are integers")
        if not 0 <= token < vocab_size:
            raise InvalidRequest(field, token, f"token ids are from 0 to {vocab_size - 1}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLimits:
    """How long prompt and answer may be, in tokens, and what errors call them."""

    max_model_len: int  # prompt and answer together
    max_side_len: int | None  # prompt or answer alone, in encoder-decoder models
    prompt_field: str
    max_tokens_field: str

    def num_new_tokens(self, asked: int | None, default: int, num_prompt: int) -> int:
        """What a request may generate: as asked, or the default as far as there is room.

        Raises InvalidRequest when prompt and answer do not fit into the model.
        """
        self._check_prompt(num_prompt)
        if asked is None:
            return min(default, self.max_model_len - num_prompt, self.max_side_len or default)
        if self.max_side_len is not None and asked > self.max_side_len:
            raise self._too_long(
                self.max_tokens_field, asked, f"the model's decoder writes at most {self.max_side_len} tokens"
            )
        if num_prompt + asked > self.max_model_len:
            tokens = counted(num_prompt, "token")
            limit = f"with the {tokens} of the prompt it exceeds the limit of {self.max_model_len} tokens"
            raise self._too_long(self.max_tokens_field, asked, limit)
        return asked

    def _check_prompt(self, num_prompt: int) -> None:
        tokens = counted(num_prompt, "token")
        if num_prompt == 0:
            raise InvalidRequest(self.prompt_field, Size("empty"), "a prompt needs at least one token")
        if num_prompt >= self.max_model_len:
            limit = f"there is room for at most {self.max_model_len} tokens, prompt and answer together"
            raise self._too_long(self.prompt_field, tokens, limit)
        if self.max_side_len is not None and num_prompt > self.max_side_len:
            limit = f"the model's encoder takes at most {self.max_side_len} tokens"
            raise self._too_long(self.prompt_field, tokens, limit)

    @staticmethod
    def _too_long(field: str, value: object, limit: str) -> InvalidRequest:
        return InvalidRequest(field, value, limit, "context_length_exceeded")


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
