"""Checks of a call that depend on the served model and on the configuration."""

from __future__ import annotations

from actors.drafters.registry import AUTO, NONE, expand_drafters, pools_of
from actors.errors import InvalidRequest
from cluster.gateway.requests.call import MAX_CHOICES, GenerationCall
from cluster.gateway.served_model import ServedModel
from cluster.gateway_config import GatewayConfig
from cluster.generation import LengthLimits, check_token_ids
from cluster.validation import counted


def check_call(call: GenerationCall, model: ServedModel, max_stops: int) -> None:
    """Raises InvalidRequest."""
    if len(call.stop) > max_stops:
        limit = f"at most {max_stops} are taken (gateway.max_stops)"
        raise InvalidRequest(call.stop_field, counted(len(call.stop), "string"), limit)
    if len(call.prompts) * call.n > MAX_CHOICES:
        field = "n" if call.num_given is None else "best_of"
        limit = f"with {counted(len(call.prompts), 'prompt')}; at most {MAX_CHOICES} answers in one call"
        raise InvalidRequest(field, call.n, limit)
    if call.options.drafters is not None:
        _check_drafters(call.options.drafters, model)
    if model.max_side_len is not None and call.options.prompt_logprobs is not None:
        name, instead = ("logprobs", "send it without echo")
        if call.prompt_logprobs is not None:
            name, instead = ("prompt_logprobs", "leave it out")
        limit = f"an encoder-decoder model has no log-probabilities of its prompt; {instead}"
        raise InvalidRequest(name, call.options.prompt_logprobs, limit, "unsupported_value")
    check_token_ids("stop_token_ids", call.options.stop_token_ids or (), model.vocab_size)
    check_token_ids("logit_bias", (token for token, _ in call.options.logit_bias), model.vocab_size)


def num_new_tokens(call: GenerationCall, num_prompt: int, model: ServedModel, config: GatewayConfig) -> int:
    """What the request may generate; raises InvalidRequest beyond the model's limit or the gateway's own."""
    asked, most = call.options.max_new_tokens, config.max_new_tokens
    if asked is not None and asked > most:
        raise InvalidRequest(call.max_tokens_field, asked, f"at most {most} tokens are generated")
    limits = LengthLimits(
        max_model_len=model.max_model_len,
        max_side_len=model.max_side_len,
        prompt_field=call.prompt_field,
        max_tokens_field=call.max_tokens_field,
    )
    return limits.num_new_tokens(asked, min(config.default_max_tokens, most), num_prompt)


def _check_drafters(names: tuple[str, ...], model: ServedModel) -> None:
    """Raises InvalidRequest for drafters that do not run here: the call would silently get no drafts."""
    pools = pools_of(model.drafters)
    expand_drafters(names, pools=pools, field="speculation.drafters")
    for name in names:
        if name not in (AUTO, NONE, *model.drafters):
            have = ", ".join(model.drafters) or "no drafters"
            raise InvalidRequest("speculation.drafters", name, f"here run {have}")
