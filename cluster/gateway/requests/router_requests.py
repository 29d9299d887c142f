"""The router's requests that a call becomes: one for each answer."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec
import numpy as np

from actors.messages import GenerationRequest, no_tokens
from cluster.gateway.requests.call import GenerationCall
from cluster.gateway.served_model import ServedModel
from cluster.tenants.gatekeeper import Tenant
from cluster.tenants.scope import Scope
from cluster.text.text_codec import EncodedPrompt


def shared_request(
    call: GenerationCall,
    model: ServedModel,
    *,
    scope: Scope,
    tenant: Tenant | None,
    grammar: str,
    prediction: np.ndarray,
    timeout_s: float,
    caller_id: str,
    timed_rounds: int | None = None,
) -> GenerationRequest:
    """What the requests of a call have in common. prediction: int32 [n]. timed_rounds: None: not traced."""
    options = call.options
    stop_token_ids = tuple(options.stop_token_ids or ())
    if grammar or not options.ignore_eos:  # what follows a grammar ends where it ends
        stop_token_ids = tuple(dict.fromkeys((*stop_token_ids, *model.eos_token_ids)))
    return GenerationRequest(
        request_id="",
        prompt_token_ids=no_tokens(),
        sampling=options.sampling(seed=0),
        max_new_tokens=1,
        stop_token_ids=stop_token_ids,
        timeout_s=timeout_s,
        # Statistics in each chunk, for a stop string ends a request here, before its last chunk.
        wants_stats=call.wants_stats or (bool(call.stop) and (timed_rounds is not None or bool(call.prediction))),
        prediction_token_ids=prediction[: model.max_model_len],
        caller_id=caller_id,
        timed_rounds=-1 if timed_rounds is None else timed_rounds,
        grammar=grammar,
        grammar_field=call.constraint_field or "tools",
        num_logprobs=max(options.num_logprobs, -1 if call.num_given is None else 0),  # answers are ranked by them
        num_prompt_logprobs=options.num_prompt_logprobs,
        drafters=options.drafters,
        max_draft_tokens=options.max_draft_tokens,
        tenant="" if tenant is None else tenant.id,
        tenant_weight=1.0 if tenant is None else tenant.limits.weight or 1.0,
        service_class=call.service_class or ("interactive" if tenant is None else tenant.service_class),
        namespace=scope.namespace,
        prefix_namespace=scope.prefix_namespace,
        cache=scope.cache,
        readable=scope.readable,
        # What a group has is not one tenant's to limit.
        cache_bytes=None if tenant is None or scope.has_company else tenant.limits.cache_bytes,
        promotes=scope.promotes,
    )


def requests_of(
    call: GenerationCall,
    call_id: str,
    prompts: Sequence[EncodedPrompt],
    budgets: Sequence[int],
    shared: GenerationRequest,
) -> tuple[GenerationRequest, ...]:
    """One per answer, in order of choice. budgets: tokens to generate for each prompt."""
    seed = secrets.randbits(64) if call.options.seed is None else call.options.seed
    return tuple(
        msgspec.structs.replace(
            shared,
            request_id=f"{call_id}-{index * call.n + answer}",
            prompt_token_ids=prompt.token_ids,
            sampling=call.options.sampling(seed + answer),
            max_new_tokens=budgets[index],
        )
        for index, prompt in enumerate(prompts)
        for answer in range(call.n)
    )
