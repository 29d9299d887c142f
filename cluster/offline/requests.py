"""Requests of one process: prompts and options as they are given, within the limits of an engine."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast, get_args

import jinja2
import numpy as np

from actors.drafters.registry import AUTO, NONE, expand_drafters
from actors.errors import InvalidRequest
from actors.messages import Acceptance, CacheUse, GenerationRequest, SamplingParams
from actors.models.loader import ModelInfo
from cache_service.errors import SettingError
from cache_service.formats.namespaces import OPEN
from cache_service.formats.store_keys import StoreKeys
from cluster.request_limits import check_local_fields, check_token_ids, num_new_tokens

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]

DEFAULT_NEW_TOKENS = 256


class GenerateOptions(TypedDict, total=False):
    """The options of `LocalEngine.generate`, which describes them; the defaults are the same."""

    max_new_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    ignore_eos: bool
    stop_token_ids: Sequence[int]
    drafters: Sequence[str] | None
    max_draft_tokens: int | None
    predictions: Sequence[str | Sequence[int]]
    namespace: str
    cache: CacheUse


class LocalRequests:
    """Makes requests of a model, by the same limits as over HTTP, and numbers them."""

    def __init__(
        self,
        tokenizer: Any,
        info: ModelInfo,
        vocab_size: int,
        max_model_len: int,
        drafter_names: tuple[str, ...],
        acceptance: Acceptance,
    ) -> None:
        """tokenizer: of `transformers`. vocab_size, max_model_len: of the engine, which may have less room than the
        model."""
        self._tokenizer = tokenizer
        self._info = info
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._drafter_names = drafter_names
        self._acceptance = acceptance
        self._num_requests = 0

    def make(self, prompts: Sequence[tuple[str, Prompt]], options: GenerateOptions) -> list[GenerationRequest]:
        """prompts: with what an error calls them. Raises InvalidRequest."""
        stop_token_ids = options.get("stop_token_ids", ())
        own = ("ignore_eos", "drafters", "predictions", "namespace", "cache")
        checked = {name: value for name, value in options.items() if name not in own}
        check_local_fields({**checked, "stop_token_ids": list(stop_token_ids)})
        check_token_ids("stop_token_ids", stop_token_ids, self._vocab_size)
        drafters = self._chosen_drafters(options.get("drafters"))
        namespace, cache = options.get("namespace", ""), options.get("cache", "read_write")
        self._check_sharing(namespace, cache)
        seed = options.get("seed")
        base_seed = secrets.randbits(64) if seed is None else seed
        predictions = options.get("predictions") or [""] * len(prompts)
        if len(predictions) != len(prompts):
            raise InvalidRequest("predictions", f"{len(predictions)} of them", f"there are {len(prompts)} prompts")
        stops = tuple(stop_token_ids) + (() if options.get("ignore_eos") else self._info.eos_token_ids)
        requests = []
        for index, (name, prompt) in enumerate(prompts):
            token_ids = self._encode(prompt, name)
            self._num_requests += 1
            requests.append(
                GenerationRequest(
                    request_id=str(self._num_requests),
                    prompt_token_ids=np.asarray(token_ids, dtype=np.int32),
                    sampling=SamplingParams(
                        seed=(base_seed + index) % 2**64,
                        temperature=options.get("temperature", 0.0),
                        top_k=max(0, options.get("top_k", 0)),
                        top_p=options.get("top_p", 1.0),
                        min_p=options.get("min_p", 0.0),
                        presence_penalty=options.get("presence_penalty", 0.0),
                        frequency_penalty=options.get("frequency_penalty", 0.0),
                        repetition_penalty=options.get("repetition_penalty", 1.0),
                        acceptance=self._acceptance,
                    ),
                    max_new_tokens=num_new_tokens(
                        options.get("max_new_tokens"),
                        DEFAULT_NEW_TOKENS,
                        len(token_ids),
                        self._max_model_len,
                        name,
                        "max_new_tokens",
                        self._info.max_side_len,
                    ),
                    stop_token_ids=stops,
                    namespace=namespace,
                    cache=cache,
                    drafters=drafters,
                    max_draft_tokens=options.get("max_draft_tokens"),
                    prediction_token_ids=self._encode_prediction(predictions[index], f"predictions[{index}]"),
                )
            )
        return requests

    def _check_sharing(self, namespace: str, cache: str) -> None:
        if cache not in get_args(CacheUse):
            raise InvalidRequest("cache", cache, f"it must be one of {', '.join(get_args(CacheUse))}")
        try:
            StoreKeys(self._info.fingerprint, namespace or OPEN)
        except SettingError as error:
            raise InvalidRequest("namespace", namespace, error.limit) from None

    def _chosen_drafters(self, names: Sequence[str] | None) -> tuple[str, ...] | None:
        if names is None:
            return None
        expand_drafters(list(names), acceptance=self._acceptance)
        for name in names:
            if name not in (AUTO, NONE, *self._drafter_names):
                have = ", ".join(self._drafter_names) or "none"
                raise InvalidRequest("drafters", name, f"this engine was made with {have}")
        return tuple(names)

    def _encode(self, prompt: Prompt, field: str) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self._tokenizer.encode(prompt)
        elif prompt and isinstance(prompt[0], Mapping):
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
        shown = f"{len(messages)} messages"
        if not self._tokenizer.chat_template:
            raise InvalidRequest(field, shown, f"model {self._info.name!r} has no chat template; give a text instead")
        try:
            token_ids: Any = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(field, shown, f"the model's chat template refuses them: {error}") from None
        return list(token_ids)
