"""Parameters of other servers' clients that this server does not implement, with the values it accepts.

A value that cannot change the answer is accepted and dropped. Any other is refused by name, with what to do instead.
The names come from OpenAI, vLLM, SGLang, llama.cpp, TGI and Ollama. Parameters that are implemented are in `schema`.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from actors.errors import InvalidRequest
from cluster.validation import shown, size_of


@dataclass(frozen=True, slots=True)
class ForeignField:
    """reason: why other values are refused, or why none is. harmless: accepted besides null. holds_text: errors do not
    show the value."""

    reason: str
    harmless: tuple[object, ...] = ()
    accepts_all: bool = False
    holds_text: bool = False


def _ignored(reason: str) -> ForeignField:
    return ForeignField(reason, accepts_all=True)


def _only(*harmless: object, reason: str = "") -> ForeignField:
    return ForeignField(reason, harmless)


def _refused(reason: str, *, holds_text: bool = False) -> ForeignField:
    return ForeignField(reason, holds_text=holds_text)


_BOOKKEEPING = _ignored("the client's own bookkeeping")
_SPEED = _ignored("concerns speed only")
_TUNES_REFUSED = _ignored("tunes a sampler that is refused unless it is off")
_OTHER_MODEL = _only(reason="adapters are not served")
_ONE_REPLICA = _only(reason="the server chooses the replica")

_NO_BEAMS = (
    "beam search is not served over HTTP; the local engine has it: `paceline generate --beams N`, or "
    "LocalEngine.beam_search in Python"
)

FOREIGN_FIELDS: dict[str, ForeignField] = {
    # OpenAI
    "audio": _only(reason="answers are text"),
    "best_of": _only(1, reason=f"answers are ranked by /v1/completions only; ask for several with n; {_NO_BEAMS}"),
    "function_call": _only("none", reason="it is deprecated; see tools"),
    "functions": _only([], reason="it is deprecated; see tools"),
    "metadata": _BOOKKEEPING,
    "modalities": _only(["text"], reason="answers are text"),
    "moderation": _only(reason="nothing is moderated here"),
    "prompt_cache_key": _SPEED,
    "prompt_cache_options": _only(),
    "prompt_cache_retention": _SPEED,
    "safety_identifier": _BOOKKEEPING,
    "store": _only(False, reason="nothing is stored here"),
    "suffix": ForeignField("/v1/completions has it", ("",), holds_text=True),
    "verbosity": _only("medium", reason="no model here has it"),
    "web_search_options": _only(reason="there is no web search"),
    # vLLM
    "allowed_token_ids": _only(reason="constrain the answer with structured_outputs, or logit_bias"),
    "bad_words": _only([], reason="use logit_bias"),
    "chat_template": _refused(
        "the model's own template is used; pass it values in chat_template_kwargs", holds_text=True
    ),
    "detokenize": _only(True, reason="answers are text; return_token_ids adds token ids"),
    "documents": _only([], reason="write documents into a message"),
    "echo": _only(False, reason="/v1/completions has it"),
    "early_stopping": _only(False, reason=_NO_BEAMS),
    "guided_decoding_backend": _SPEED,
    "include_reasoning": _only(True, reason="reasoning is part of the answer"),
    "kv_transfer_params": _only(),
    "length_penalty": _only(1, reason=_NO_BEAMS),
    "logits_processors": _only([], reason="code of clients is not run"),
    "media_io_kwargs": _only({}, reason="prompts are text"),
    "mm_processor_kwargs": _only({}, reason="prompts are text"),
    "priority": _only(0, reason="requests run in order of arrival"),
    "request_id": _ignored("the call's id is the header x-request-id"),
    "return_tokens_as_token_ids": _only(False, reason="return_token_ids adds token ids"),
    "spaces_between_special_tokens": _only(
        True, False, reason="special tokens are written as the tokenizer writes them"
    ),
    "truncate_prompt_tokens": _only(reason="prompts are not cut; shorten the prompt"),
    "use_beam_search": _only(False, reason=_NO_BEAMS),
    "vllm_xargs": _only({}),
    # SGLang
    "custom_logit_processor": _only(reason="code of clients is not run"),
    "custom_params": _only({}),
    "data_parallel_rank": _ONE_REPLICA,
    "ebnf": _refused("use structured_outputs.grammar", holds_text=True),
    "extra_key": _refused("use cache_salt", holds_text=True),
    "json_schema": _refused("use response_format, or structured_outputs.json", holds_text=True),
    "lora_path": _OTHER_MODEL,
    "max_new_tokens": _refused("use max_tokens"),
    "min_new_tokens": _only(0, reason="use min_tokens"),
    "no_stop_trim": _only(False, reason="use include_stop_str_in_output"),
    "regex": _refused("use structured_outputs.regex", holds_text=True),
    "return_hidden_states": _only(False),
    "rid": _ignored("the call's id is the header x-request-id"),
    "sampling_params": _refused("send its members as parameters of their own"),
    "separate_reasoning": _only(False, reason="reasoning is part of the answer"),
    "session_params": _only({}, reason="nothing is stored here"),
    "stream_reasoning": _only(True, reason="reasoning is part of the answer"),
    # llama.cpp
    "cache_prompt": _SPEED,
    "dry_allowed_length": _TUNES_REFUSED,
    "dry_base": _TUNES_REFUSED,
    "dry_multiplier": _only(0, reason="use repetition_penalty"),
    "dry_penalty_last_n": _TUNES_REFUSED,
    "dry_sequence_breakers": _TUNES_REFUSED,
    "dynatemp_exponent": _TUNES_REFUSED,
    "dynatemp_range": _only(0, reason="the temperature is constant"),
    "grammar": _refused("use structured_outputs.grammar", holds_text=True),
    "id_slot": _SPEED,
    "lora": _only([], reason="adapters are not served"),
    "min_keep": _only(0, 1),
    "mirostat": _only(0),
    "mirostat_eta": _TUNES_REFUSED,
    "mirostat_tau": _TUNES_REFUSED,
    "n_cache_reuse": _SPEED,
    "n_indent": _only(0),
    "n_keep": _only(0, -1, reason="prompts are not cut"),
    "n_predict": _refused("use max_tokens"),
    "n_probs": _only(0),
    "parse_tool_calls": _only(True, reason="calls are told from the text where there are tools"),
    "post_sampling_probs": _only(False),
    "reasoning_format": _only("auto", "deepseek", reason="thoughts are in reasoning_content"),
    "repeat_last_n": _only(-1, reason="penalties see the whole text"),
    "repeat_penalty": _only(1, reason="use repetition_penalty"),
    "response_fields": _only([], reason="answers have all their members"),
    "return_progress": _only(False),
    "return_tokens": _only(False, reason="use return_token_ids"),
    "samplers": _refused("the order is temperature, top_k, top_p, min_p"),
    "speculative.n_max": _SPEED,
    "speculative.n_min": _SPEED,
    "speculative.p_min": _SPEED,
    "t_max_predict_ms": _only(0, reason="use the header x-request-timeout-seconds"),
    "tfs_z": _only(1),
    "timings_per_token": _only(False, reason="speculation.stats adds statistics"),
    "top_n_sigma": _only(-1, 0),
    "typical_p": _only(1),
    "xtc_probability": _only(0),
    "xtc_threshold": _TUNES_REFUSED,
    # TGI and Ollama
    "adapter_id": _OTHER_MODEL,
    "decoder_input_details": _only(False),
    "details": _only(False),
    "format": _refused("use response_format"),
    "keep_alive": _SPEED,
    "options": _only({}, reason="send its members as parameters of their own"),
    "raw": _only(False),
    "return_full_text": _only(False),
    "system": _refused("send a message with role system", holds_text=True),
    "template": _refused("the model's own template is used", holds_text=True),
    "truncate": _only(reason="prompts are not cut; shorten the prompt"),
    "typical": _only(1),
    "watermark": _only(False),
}


def without_foreign(fields: Mapping[str, Any], own: Container[str] = ()) -> dict[str, Any]:
    """The fields that are not in the table. own: names that the endpoint implements, even if they are in the table.
    Raises InvalidRequest for a value that would change the answer."""
    kept = {}
    for name, value in fields.items():
        foreign = None if name in own else FOREIGN_FIELDS.get(name)
        if foreign is None:
            kept[name] = value
        elif value is not None and not _is_harmless(value, foreign):
            told = size_of(value) if foreign.holds_text else shown(value)
            raise InvalidRequest(name, told, _refusal(foreign), "unsupported_parameter")
    return kept


def _is_harmless(value: object, foreign: ForeignField) -> bool:
    return foreign.accepts_all or any(_same(value, one) for one in foreign.harmless)


def _same(value: object, other: object) -> bool:
    """Equal in JSON: 1 and 1.0 are, 1 and true are not."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _refusal(foreign: ForeignField) -> str:
    reason = f"; {foreign.reason}" if foreign.reason else ""
    if not foreign.harmless:
        return f"this parameter is not supported here{reason}"
    values = " or ".join(repr(value) if isinstance(value, str) else json.dumps(value) for value in foreign.harmless)
    return f"this parameter is not supported here, except {values}{reason}"
