"""One token out of a target group: it is whole, its weights are there, and it computes."""

from __future__ import annotations

import secrets

import numpy as np

from actors.errors import Unavailable
from actors.links.client import AsyncLink
from actors.messages import SamplingParams, SequenceDelta, SequenceStart, VerifyBatch, VerifyItem, VerifyResult

_ROUND = 0  # no router numbers a round of its own so


async def warm_up_token(link: AsyncLink, vocab_size: int, timeout_s: float) -> int:
    """The token that follows a prompt of one, by all ranks.

    Raises Unavailable where the target says anything but a token, LinkError where it does not answer in time.
    """
    seq_id = secrets.randbits(62)
    prompt = np.zeros(1, np.int32)
    begin = SequenceStart(SamplingParams(seed=0, temperature=0.0), len(prompt), "warm-up")
    item = VerifyItem(SequenceDelta(seq_id, 0, prompt), 1, begin=begin)
    try:
        answer = await link.call(VerifyBatch(_ROUND, [item], []), timeout_s)
    finally:
        await link.call(VerifyBatch(_ROUND, [], [seq_id]), timeout_s)
    tokens = [verdict.next_token for verdict in answer.verdicts] if isinstance(answer, VerifyResult) else []
    if len(tokens) != 1 or not 0 <= tokens[0] < vocab_size:
        raise Unavailable(f"no warm-up token came out of the target: {answer}")
    return tokens[0]
