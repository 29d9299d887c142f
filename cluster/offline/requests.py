"""Makes the local engine's requests from prompts and options."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jinja2
import numpy as np

from actors.drafters.registry import AUTO, NONE, expand_drafters, pools_of
from actors.errors import InvalidRequest
from actors.grammar.grammars import Grammars
from actors.messages import Acceptance, GenerationRequest, WorkerInfo
from actors.models.loader import ModelInfo
from cache_service.errors import SettingError
from cache_service.formats.namespaces import OPEN
from cache_service.formats.store_keys import StoreKeys
from cluster.constraints.structured_outputs import StructuredOutputs
from cluster.generation import LOCAL_NEW_TOKENS, GenerationOptions, LengthLimits, check_token_ids
from cluster.text.constraint_grammar import constraint_grammar
from cluster.text.special_tokens import special_token_ids
from cluster.validation import counted, shown

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class LocalRequests:
    """Makes numbered requests, with the same limits as over HTTP."""

    def __init__(
        self,
        tokenizer: Any,
        info: ModelInfo,
        target: WorkerInfo,
        drafter_names: tuple[str, ...],
        acceptance: Acceptance,
        grammars: Grammars,
    ) -> None:
        """tokenizer: from `transformers`. target: limits of the engine, which may be below the model's."""
        self._tokenizer = tokenizer
        self._special_ids = special_token_ids(tokenizer)
        self._info = info
        self._vocab_size = target.vocab_size
        self._max_model_len = target.max_model_len
        self._drafter_names = drafter_names
        self._acceptance = acceptance
        self._grammars = grammars
        self._num_requests = 0

    def make(
        self,
        prompts: Sequence[tuple[str, Prompt]],
        options: GenerationOptions,
        predictions: Sequence[str | Sequence[int]] = (),
    ) -> list[GenerationRequest]:
        """prompts: pairs (field name for errors, prompt). Raises InvalidRequest."""
        stops = tuple(options.stop_token_ids or ())
        check_token_ids("stop_token_ids", stops, self._vocab_size)
        check_token_ids("logit_bias", (token for token, _ in options.logit_bias), self._vocab_size)
        if options.prompt_logprobs is not None and self._info.is_encoder_decoder:
            raise InvalidRequest("prompt_logprobs", options.prompt_logprobs, "an encoder gives its prompt none")
        self._check_drafters(options.drafters)
        self._check_namespace(options.namespace)
        predictions = predictions or [""] * len(prompts)
        if len(predictions) != len(prompts):
            raise InvalidRequest("predictions", f"{len(predictions)} of them", f"there are {len(prompts)} prompts")
        outputs = options.structured_outputs
        field = "" if outputs is None else f"structured_outputs.{outputs.kind}"
        grammar = "" if outputs is None else self._grammar(outputs, field)
        if grammar or not options.ignore_eos:  # what follows a grammar ends where it ends
            stops += self._info.eos_token_ids
        seed = secrets.randbits(64) if options.seed is None else options.seed
        requests = []
        for index, (name, prompt) in enumerate(prompts):
            token_ids = self._encode(prompt, name)
            self._num_requests += 1
            requests.append(
                GenerationRequest(
                    request_id=str(self._num_requests),
                    prompt_token_ids=np.asarray(token_ids, dtype=np.int32),
                    sampling=options.sampling(seed + index, self._acceptance),
                    max_new_tokens=self._num_new_tokens(options.max_new_tokens, len(token_ids), name),
                    stop_token_ids=stops,
                    namespace=options.namespace,
                    cache=options.cache,
                    drafters=options.drafters,
                    max_draft_tokens=options.max_draft_tokens,
                    prediction_token_ids=self._encode_prediction(predictions[index], f"predictions[{index}]"),
                    grammar=grammar,
                    grammar_field=field,
                    num_logprobs=options.num_logprobs,
                    num_prompt_logprobs=options.num_prompt_logprobs,
                )
            )
        return requests

    def _num_new_tokens(self, asked: int | None, num_prompt: int, prompt_field: str) -> int:
        limits = LengthLimits(
            max_model_len=self._max_model_len,
            max_side_len=self._info.max_side_len,
            prompt_field=prompt_field,
            max_tokens_field="max_new_tokens",
        )
        return limits.num_new_tokens(asked, LOCAL_NEW_TOKENS, num_prompt)

    def _grammar(self, outputs: StructuredOutputs, field: str) -> str:
        """As in `GenerationRequest`. Raises InvalidRequest for one that cannot be compiled."""
        grammar = constraint_grammar(outputs, self._special_ids, field)
        self._grammars.matcher(grammar, field)
        return grammar

    def _check_namespace(self, namespace: str) -> None:
        try:
            StoreKeys(self._info.fingerprint, namespace or OPEN)
        except SettingError as error:
            raise InvalidRequest("namespace", namespace, error.limit) from None

    def _check_drafters(self, names: tuple[str, ...] | None) -> None:
        if names is None:
            return
        expand_drafters(names, pools=pools_of(self._drafter_names))
        for name in names:
            if name not in (AUTO, NONE, *self._drafter_names):
                have = ", ".join(self._drafter_names) or "none"
                raise InvalidRequest("drafters", name, f"this engine was made with {have}")

    def _encode(self, prompt: Prompt, field: str) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self._tokenizer.encode(prompt)
        elif not isinstance(prompt, Sequence | np.ndarray):
            raise InvalidRequest(field, shown(prompt), "it must be a text, a list of messages or a list of token ids")
        elif len(prompt) and isinstance(prompt[0], Mapping):
            token_ids = self._encode_conversation(list(cast(Sequence[Mapping[str, str]], prompt)), field)
        else:
            token_ids = list(cast(Sequence[int], prompt))
            check_token_ids(field, token_ids, self._vocab_size)
        return list(token_ids)

    def _encode_prediction(self, prediction: str | Sequence[int], field: str) -> np.ndarray:
        if isinstance(prediction, str):
            token_ids = self._tokenizer.encode(prediction, add_special_tokens=False) if prediction else []
        else:
            token_ids = list(prediction)
            check_token_ids(field, token_ids, self._vocab_size)
        return np.asarray(token_ids[: self._max_model_len], dtype=np.int32)

    def _encode_conversation(self, messages: list[Mapping[str, str]], field: str) -> list[int]:
        told = counted(len(messages), "message")
        if not self._tokenizer.chat_template:
            raise InvalidRequest(field, told, f"model {self._info.name!r} has no chat template; give a text instead")
        try:
            token_ids: Any = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(field, told, f"the model's chat template refuses them: {error}") from None
        return list(token_ids)
