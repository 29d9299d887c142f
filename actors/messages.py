"""Everything that crosses a link between router, draft workers and target group.

Rules: the router is the only truth about committed tokens and workers hold copies; a receiver whose length
differs from `SequenceDelta.start` answers with the sequence in `stale_seq_ids` and is sent it again from 0;
an empty draft tree is always valid; one message per worker and round, except for masks, which follow their batch.
Arrays are numpy int32 or float32.

Encoding is msgpack (msgspec), arrays as extension types. `codec.py` in `actors/links` frames and versions it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

from actors.draft_tree import DraftTree
from actors.draft_worth import no_worth

PROTOCOL_VERSION = 11

Acceptance = Literal["coupled", "rejection"]
DraftMethod = Literal["tree", "lookahead"]
TARGET = "target"  # source of a recovered or bonus token
CacheUse = Literal["off", "read", "read_write"]
ServiceClass = Literal["interactive", "batch"]


def no_tokens() -> np.ndarray:
    return np.empty(0, dtype=np.int32)


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How the target's logits become a token. Processing order: repetition penalty, presence and frequency
    penalties, logit bias, temperature, top-k, top-p, min-p. The token is a function of seed, position and logits."""

    seed: int  # 0 <= seed < 2**64
    temperature: float = 1.0  # <= 1e-6 means argmax
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    presence_penalty: float = 0.0  # once per distinct output token
    frequency_penalty: float = 0.0  # per occurrence in the output
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits of tokens in prompt or output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to the logit)
    acceptance: Acceptance = "coupled"

    @property
    def is_greedy(self) -> bool:
        return self.temperature <= 1e-6


class Refusal(msgspec.Struct, frozen=True):
    """A router's, since its queue is full or it would miss the request's objective."""

    router_id: str
    retry_after_s: float


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the gateway hands it to a router; validated at the gateway, trusted afterwards."""

    request_id: str
    prompt_token_ids: np.ndarray  # int32 [n], n >= 1; after a failover it ends with tokens already delivered
    num_output_in_prompt: int = 0  # how many of the last prompt tokens are output already delivered
    sampling: SamplingParams
    max_new_tokens: int  # >= 1, counted from the end of prompt_token_ids
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included, unless the caller ignores them
    tenant: str = ""  # id of the tenant; "": the server needs no keys
    tenant_weight: float = 1.0  # share of its tenant beside others' of the same class
    service_class: ServiceClass = "interactive"  # which objectives count for it
    asks_another: bool = False  # where a router cannot meet its objective, another one is asked at once
    refusal: Refusal | None = None  # of the router that was asked before
    namespace: str = ""  # learnt tokens are shared inside one namespace only
    prefix_namespace: str = ""  # prefix blocks are shared inside this one; "": inside `namespace`
    cache: CacheUse = "read_write"  # whether it drafts from the shared cache, and whether its tokens are published
    readable: tuple[str, ...] = ()  # further namespaces of the shared cache that it may draft from, nearest first
    cache_bytes: int | None = None  # limit of its tenant's data in the shared cache; None: no limit
    # Opaque name of the organisation that offers the answer to the public pool; "": it stays in its namespace.
    promotes: str = ""
    caller_id: str = ""  # id of its call, for logs and spans; clients may choose it, so it is not unique
    timed_rounds: int = -1  # first rounds to report times of, one by one; -1: no times at all
    timeout_s: float | None = None  # None: no deadline
    wants_stats: bool = False  # statistics in every chunk, for a caller that may stop listening before the last one
    drafters: tuple[str, ...] | None = None  # None: what the cluster is configured with; (): no speculation
    max_draft_tokens: int | None = None  # None: the planner's own limit
    prediction_token_ids: np.ndarray = msgspec.field(default_factory=no_tokens)  # int32: the output the caller expects
    grammar: str = ""  # that the output follows, in llguidance's format; "": none
    grammar_field: str = "grammar"  # the caller's name of it, for errors
    num_logprobs: int = -1  # likeliest tokens whose log-probabilities it wants beside each token's; -1: none at all
    num_prompt_logprobs: int = -1  # the same for the tokens of the prompt, which is then computed without its cache
    gateway: bytes = b""  # where its chunks go, beside Serve: see `cluster.routing.chunk_streams`; b"": nowhere


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities by the raw logits, at temperature 1 and without penalties or grammar."""

    chosen: np.ndarray  # float32 [n]: of n tokens that follow one another
    token_ids: np.ndarray  # int32 [n * k]: the likeliest tokens in each one's place, likeliest first
    logprobs: np.ndarray  # float32 [n * k]
    k: int

    def __len__(self) -> int:
        return len(self.chosen)

    @staticmethod
    def joined(parts: list[TokenLogprobs], k: int) -> TokenLogprobs:
        """Those of all parts, one after the other. k: of each part."""
        if not parts:
            return TokenLogprobs(np.empty(0, np.float32), np.empty(0, np.int32), np.empty(0, np.float32), k)
        return TokenLogprobs(
            np.concatenate([part.chosen for part in parts]),
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            parts[0].k,
        )

    def first(self, count: int) -> TokenLogprobs:
        """Those of the first `count` tokens."""
        end = count * self.k
        return TokenLogprobs(self.chosen[:count], self.token_ids[:end], self.logprobs[:end], self.k)


class SpeculationStats(msgspec.Struct, kw_only=True):
    """Statistics of speculation for one request."""

    rounds: int = 0  # target forwards that emitted tokens of this request
    target_rows: int = 0  # rows the target computed for it, prompt included
    draft_tokens: int = 0  # tree nodes verified
    accepted_tokens: dict[str, int] = {}  # by source


class RoundTimes(msgspec.Struct, frozen=True, array_like=True):
    """One round of a request, in seconds since the router took the request."""

    planned_s: float
    drafted_s: float  # the drafts were chosen, and the target was asked
    verified_s: float
    num_tokens: int  # emitted
    num_drafted: int  # draft nodes verified


class RequestTimes(msgspec.Struct, kw_only=True):
    """Where the time of a request went, in seconds since the router took it; for spans."""

    started_s: float = 0.0  # its first round was planned
    first_token_s: float = 0.0
    ended_s: float = 0.0
    draft_s: float = 0.0  # making and choosing drafts, in all rounds after the first token
    verify_s: float = 0.0  # waiting for the target, in these rounds
    rounds: list[RoundTimes] = []  # the first of these rounds, as many as were asked for


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """All tokens that one round emitted for a request. The last chunk has a finish reason."""

    request_id: str
    index: int  # 0, 1, 2, ... within the request
    token_ids: tuple[int, ...]  # may be empty in the last chunk
    finish_reason: Literal["stop", "length", "cancelled"] | None = None
    sources: tuple[str, ...] = ()  # who proposed each token; "target" for recovered and bonus tokens
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache (first chunk)
    stats: SpeculationStats | None = None  # so far: in the last chunk, and in all where the request wants them
    times: RequestTimes | None = None  # where the request wants them: in the chunks that have `stats`
    logprobs: TokenLogprobs | None = None  # of token_ids, where the request wants them
    # Log-probabilities of the prompt's tokens except the first, in the first chunk, if the request asks for them.
    prompt_logprobs: TokenLogprobs | None = None
    attempt: str = ""  # drawn by the router for each call; Ray Serve may repeat a call that is being answered


class SequenceDelta(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that the receiver lacks. start == 0 (re)starts the sequence and forgets what was there.

    A receiver that computed draft nodes in its last round walks that tree with token_ids: siblings are distinct, so
    the nodes on the walk are the accepted path, and their KV is kept. No list of kept nodes needs to travel.
    """

    seq_id: int
    start: int  # tokens the receiver must already know, else it answers stale
    token_ids: np.ndarray  # int32 [n]: the next ones, in order


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """What a worker needs to know about a sequence besides its tokens; sent with start == 0."""

    sampling: SamplingParams
    num_prompt_tokens: int  # tokens before this index are prompt, for the output penalties
    namespace: str = ""
    num_logprobs: int = -1  # as in `GenerationRequest`, as is the next
    num_prompt_logprobs: int = -1
    grammar: str = ""  # only for draft workers: that the output follows, as in `GenerationRequest`


class DraftItem(msgspec.Struct, frozen=True, array_like=True):
    delta: SequenceDelta
    max_nodes: int  # >= 0; 0 only brings the drafter up to date
    begin: SequenceStart | None = None  # present when delta.start == 0
    max_depth: int = 0  # tokens of the longest path; 0: as many as max_nodes
    branch: int = 1  # guesses for each next token; 1: a chain
    # lookahead: a chain of about `max_depth` tokens, drafted in fewer forwards with phrases, and phrases behind it
    method: DraftMethod = "tree"
    # int32, for lookahead: texts that may follow, each from the last token to a -1; used for this draft only
    runs: np.ndarray = msgspec.field(default_factory=no_tokens)
    # int32, for lookahead: target predictions after rejected draft tokens, as texts that end with -1; to learn from
    corrections: np.ndarray = msgspec.field(default_factory=no_tokens)
    min_confidence: float = 0.0  # guesses after less likely nodes do not pay


class DraftBatch(msgspec.Struct, frozen=True, array_like=True, tag="draft"):
    round_id: int
    items: list[DraftItem]
    finished: list[int] = []  # sequences to forget
    dropped: list[str] = []  # namespaces to drop before these items
    drops_all: bool = False  # drop all namespaces: the sender does not know which have been purged
    worth: np.ndarray = msgspec.field(default_factory=no_worth)  # of a forward, as of `draft_worth.pays`


class DraftResult(msgspec.Struct, frozen=True, array_like=True, tag="drafted"):
    round_id: int
    seq_ids: list[int]
    trees: list[DraftTree]
    stale_seq_ids: list[int] = []
    elapsed_s: float = 0.0
    num_ahead: int = 0  # sequences that the worker had drafted ahead for
    num_ready: int = 0  # sequences among num_ahead whose whole draft was ready
    is_parallel: bool = False  # whether one forward gives trees of any depth
    num_forwards: int = 0  # that guessed, one after the other
    is_new_shape: bool = False  # as in `VerifyResult`


FREE_ROW = -(2**31)  # in `TokenMasks.index`: every token may follow


class TokenMasks(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a grammar allows after the last committed token and after each draft node."""

    words: np.ndarray  # int32: distinct masks of ceil(vocab_size / 32) words; bit t % 32 of word t // 32 is token t
    index: np.ndarray  # int32 [1 + nodes]: its mask; -1 - t: token t alone is allowed; FREE_ROW


class VerifyItem(msgspec.Struct, frozen=True, array_like=True):
    delta: SequenceDelta
    max_rows: int  # at most this many not yet computed tokens are computed this round (chunked prefill)
    draft: DraftTree | None = None  # to verify behind the last token; None, which is cheaper to send: an empty tree
    begin: SequenceStart | None = None  # present when delta.start == 0
    # Draft nodes that the target's draft head may propose for the next round; 0: it only takes these rows in, so that
    # it can draft later; -1: it does not even see them.
    head_nodes: int = -1
    head_min_confidence: float = 0.0  # of the head's nodes that it drafts behind, except the root
    head_worth: np.ndarray = msgspec.field(default_factory=no_worth)  # of a forward of the head, the same of all items
    # Levels that a head should expand whose launches do not wait for confidences, the same of all items; None: all.
    head_levels: int | None = None

    @property
    def tree(self) -> DraftTree:
        return DraftTree.empty() if self.draft is None else self.draft


class VerifyBatch(msgspec.Struct, frozen=True, array_like=True, tag="verify"):
    round_id: int
    items: list[VerifyItem]
    finished: list[int] = []  # sequences to free before anything else
    num_successors: int = 0  # most probable next tokens wanted of every row with logits; 0: none
    masks_follow: bool = False  # a `RoundMasks` comes next, which no token may be drawn without


class RoundMasks(msgspec.Struct, frozen=True, array_like=True, tag="masks"):
    """The masks of a batch, which the router computes while the target computes the rows. It has no answer."""

    round_id: int
    masks: list[TokenMasks | None]  # one per item of the batch; None: no grammar


# Gives the masks of one batch. It may block until they are there; raises LinkError if they do not come in time.
MasksSource = Callable[[], RoundMasks]


class AheadItem(msgspec.Struct, frozen=True, array_like=True):
    """A sequence of a round that is sent ahead. It takes part if the round before emits tokens of it."""

    seq_id: int
    tree: DraftTree | None  # texts that may follow the committed tokens of the round *before*; None: no guess
    max_nodes: int  # draft nodes that may be verified
    gain: float = 0.0  # tokens that a draft made after the round before is expected to bring


class VerifyAhead(msgspec.Struct, frozen=True, array_like=True, tag="ahead"):
    """The next round, sent while round `after` is computed, so that the target need not wait for the router.

    `actors.round_ahead.pick` makes the round's batch from it and from the outcome of round `after`, or declines it.
    """

    round_id: int
    after: int  # round id
    items: list[AheadItem]
    finished: list[int] = []  # sequences to free before anything else, if the round is carried out
    num_successors: int = 0
    least_confidence: float = 0.0  # nodes less probable after the round before are not verified
    most_lost: float = 0.0  # the round is declined if its sequences lose more tokens by drafts that are missing
    trust: float = 1.0  # tokens that drafts of such rounds bring for each that they promise by their probabilities


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """The target's result for one sequence. next_token is -1 while its tokens are not all computed."""

    seq_id: int
    num_computed: int  # committed tokens whose KV is valid after the round; draft nodes not counted
    rows: int  # rows computed for it this round
    next_token: int  # recovered or bonus token, or -1
    path: np.ndarray = msgspec.field(default_factory=no_tokens)  # accepted node indices, in order
    num_cached: int = 0  # tokens found in the prefix cache when the sequence was (re)started
    num_nodes: int = 0  # draft nodes computed: the first ones of those sent, as far as there was room
    logprobs: TokenLogprobs | None = None  # of the accepted nodes and of next_token
    prompt_logprobs: TokenLogprobs | None = None  # of the prompt tokens that follow the rows computed this round


class Successors(msgspec.Struct, frozen=True, array_like=True):
    """Target predictions: the most probable next tokens at every row with logits. The rows are, for each verdict with a
    next token, in order: the last committed token, then the draft nodes."""

    token_ids: np.ndarray  # int32 [rows * k]: by the raw logits, most probable first
    probs: np.ndarray  # float32 [rows * k]: at temperature 1, over the whole vocabulary
    k: int


class VerifyResult(msgspec.Struct, frozen=True, array_like=True, tag="verified"):
    round_id: int
    verdicts: list[Verdict]
    stale_seq_ids: list[int] = []  # unknown here or of another length: send from 0
    starved_seq_ids: list[int] = []  # no KV blocks left for them; unchanged, try again or preempt
    free_blocks: int = 0
    total_blocks: int = 0
    rows: int = 0
    elapsed_s: float = 0.0  # without the head's time
    successors: Successors | None = None
    drafted_seq_ids: list[int] = []  # sequences for which the draft head drafts the next round
    drafts: list[DraftTree] = []  # their trees: behind the verdict's next token, likeliest nodes first
    head_s: float = 0.0  # the head's time
    is_declined: bool = False  # a round sent ahead that is not carried out: nothing has changed
    # Its launches were not yet recorded: `elapsed_s` does not tell how long a round of its rows takes.
    is_new_shape: bool = False
    head_is_parallel: bool = False  # whether one forward of the head gives trees of any depth
    head_forwards: int = 0  # of the head for `drafts`: 1 and the levels of the deepest
    head_is_new_shape: bool = False  # its launches were not yet recorded: `head_s` does not tell how long they take


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Asks a worker what it is; the answer is a `WorkerInfo`."""


class WorkerInfo(msgspec.Struct, frozen=True, array_like=True, tag="info"):
    role: Literal["target", "draft"]
    incarnation: int  # differs after every restart
    vocab_size: int
    max_model_len: int
    block_size: int
    total_blocks: int
    step_times: list[tuple[int, float]] = []  # only a target: (rows, seconds) of a forward in a short context
    has_head: bool = False  # whether a draft head runs beside the target
    # Only a target: row counts that its forwards are padded to, ascending. Empty, or beyond the last: no padding.
    row_steps: list[int] = []
    chain_only: bool = False  # only a target: it verifies draft trees that are chains, and ignores others
    has_prefix_cache: bool = True  # only a target


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """A batch could not be carried out; the worker lives on. Never holds tokens or text."""

    round_id: int
    reason: str


Message = (
    Hello | WorkerInfo | Failure | DraftBatch | DraftResult | VerifyBatch | RoundMasks | VerifyAhead | VerifyResult
)

_EXT_INT32, _EXT_FLOAT32 = 1, 2
_EXT_OF_DTYPE = {np.dtype(np.int32): _EXT_INT32, np.dtype(np.float32): _EXT_FLOAT32}
_DTYPE_OF_EXT = {code: dtype for dtype, code in _EXT_OF_DTYPE.items()}


def _encode_array(value: object) -> msgspec.msgpack.Ext:
    if isinstance(value, np.ndarray) and value.ndim == 1:
        code = _EXT_OF_DTYPE.get(value.dtype)
        if code is not None:
            return msgspec.msgpack.Ext(code, value.tobytes())
    raise TypeError(f"only 1-D int32 and float32 arrays go on the wire, not {type(value).__name__}")


def _decode_ext(code: int, data: memoryview) -> np.ndarray:
    dtype = _DTYPE_OF_EXT.get(code)
    if dtype is None:
        raise ValueError(f"extension type {code} is unknown")
    return np.frombuffer(data, dtype)


def _check_array(expected: type, value: object) -> object:
    if expected is np.ndarray and isinstance(value, np.ndarray):
        return value
    raise ValueError(f"expected an array, got {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder = msgspec.msgpack.Decoder(Message, ext_hook=_decode_ext, dec_hook=_check_array)


def encode_message(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_message(data: bytes) -> Message:
    """Raises msgspec.MsgspecError or ValueError for anything that is not a message of this protocol."""
    decoded: Message = _decoder.decode(data)
    return decoded


_chunk_decoder = msgspec.msgpack.Decoder(list[TokenChunk], ext_hook=_decode_ext, dec_hook=_check_array)


def encode_chunks(chunks: list[TokenChunk]) -> bytes:
    return _encoder.encode(chunks)


def decode_chunks(data: bytes) -> list[TokenChunk]:
    """Raises msgspec.MsgspecError or ValueError for anything else."""
    return _chunk_decoder.decode(data)
