"""`LocalEngine.stream`: the same tokens as `generate`, round by round, and nothing left behind however it ends.

Covers `cluster.offline.requests` and `options`, too.
"""

import gc
import re

import pytest

from actors.errors import InvalidRequest
from cluster.config import ClusterConfig
from cluster.offline.engine import LocalEngine
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import save_tiny_model

PROMPT = "one two three one two three one two"
OPTIONS = {"max_new_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def engine(model_dir) -> LocalEngine:
    """The model drafts for itself, so drafts of it are accepted."""
    return LocalEngine(model_dir, draft_model=model_dir, device="cpu", kv_cache_tokens=4096, batch_size=2)


@pytest.fixture
def is_empty(engine):
    """Whether nothing of any request is left in the engine."""

    def check() -> bool:
        check_integrity(engine.target)
        pools = [engine.target.pool, engine._drafts["draft"].pool]
        held = engine.core.has_work or engine.target.num_sequences
        return not held and all(pool.num_free == pool.num_blocks for pool in pools)

    return check


def whole(text: str) -> str:
    """A random model says bytes that are no character; how many marks they get depends on how they are grouped."""
    return re.sub("\ufffd+", "\ufffd", text).strip("\ufffd")


def test_a_configuration_limits_the_length(model_dir):
    config = ClusterConfig.model_validate({"target": {"max_model_len": 64}})
    limited = LocalEngine(model_dir, config=config, draft_model="none", device="cpu", kv_cache_tokens=4096)
    with pytest.raises(InvalidRequest, match="there is room for at most 64 tokens"):
        limited.generate([[5] * 70])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 11}], ids=["greedy", "sampled"])
def test_a_stream_has_the_tokens_of_generate(engine, sampling, is_empty):
    (wanted,) = engine.generate([PROMPT], **OPTIONS, **sampling)
    pieces = list(engine.stream(PROMPT, **OPTIONS, **sampling))
    last = pieces[-1].generation
    assert [piece.generation for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert [token for piece in pieces for token in piece.token_ids] == wanted.token_ids == last.token_ids
    assert (last.text, last.finish_reason) == (wanted.text, "length")
    assert whole("".join(piece.text for piece in pieces)) == whole(wanted.text)
    assert len(pieces) == last.rounds
    assert is_empty()


def test_a_stream_says_who_proposed_each_token(engine):
    # Whether drafts pay is measured as it goes; among 200 tokens there are some.
    pieces = list(engine.stream(PROMPT, max_new_tokens=200, ignore_eos=True))
    for piece in pieces:
        assert len(piece.token_ids) == len(piece.sources) == len(piece.token_texts)
        assert set(piece.sources) <= {*engine.drafter_names, "target"}
        assert "".join(piece.token_texts) == piece.text or piece.generation is not None
    generation = pieces[-1].generation
    sources = [source for piece in pieces for source in piece.sources]
    assert {name: sources.count(name) for name in set(sources) - {"target"}} == generation.accepted_tokens
    assert generation.accepted_tokens


def test_a_stream_of_a_real_model_joins_to_the_text(smollm2_dir):
    engine = LocalEngine(str(smollm2_dir), draft_model="none", device="cpu", kv_cache_tokens=512)
    messages = [{"role": "user", "content": "Write 'naïve 漢字 😀' twice."}]
    pieces = list(engine.stream(messages, max_new_tokens=20))
    assert "".join(piece.text for piece in pieces) == pieces[-1].generation.text.rstrip("\ufffd")


@pytest.mark.parametrize("end", ["close", "drop", "error"])
def test_an_abandoned_stream_leaves_nothing_behind(engine, end, is_empty):
    stream = engine.stream(PROMPT, **OPTIONS)
    next(stream)
    next(stream)
    assert engine.core.num_running == 1
    if end == "close":
        stream.close()
    elif end == "error":
        with pytest.raises(KeyError):
            stream.throw(KeyError)
    del stream
    gc.collect()
    assert is_empty()
    assert len(engine.generate([PROMPT], **OPTIONS)[0].token_ids) == 40


def test_a_stream_that_was_never_begun_holds_nothing(engine, is_empty):
    engine.stream(PROMPT, **OPTIONS)
    assert is_empty()


def test_streams_and_generate_take_turns_without_taking_each_others_tokens(engine, is_empty):
    prompts = [PROMPT, "two three", "three one"]
    wanted = [generation.token_ids for generation in engine.generate(prompts, **OPTIONS)]
    streams = [engine.stream(prompt, **OPTIONS) for prompt in prompts[:2]]
    got: list[list[int]] = [[], []]
    for _ in range(3):
        for stream, token_ids in zip(streams, got, strict=True):
            token_ids.extend(next(stream).token_ids)
    assert engine.generate(prompts[2:], **OPTIONS)[0].token_ids == wanted[2]  # both rooms are taken when it comes
    for stream, token_ids in zip(streams, got, strict=True):
        token_ids.extend(token for piece in stream for token in piece.token_ids)
    assert got == wanted[:2]
    assert is_empty()


def test_drafters_of_a_request_are_a_choice_of_the_engines_own(engine, model_dir):
    plain = engine.generate([PROMPT], drafters=(), **OPTIONS)[0]
    assert (plain.draft_tokens, plain.accepted_tokens) == (0, {})
    traces = []
    only = engine.generate([PROMPT], drafters=("suffix",), on_round=traces.append, **OPTIONS)[0]
    assert {source for trace in traces for source in trace.proposed} == {"suffix"}
    assert engine.generate([PROMPT], max_draft_tokens=0, **OPTIONS)[0].draft_tokens == 0
    assert only.token_ids == plain.token_ids
    small = LocalEngine(model_dir, draft_model="none", drafters=("suffix",), kv_cache_tokens=512)
    with pytest.raises(InvalidRequest, match="drafters is 'draft_model'; this engine was made with suffix"):
        small.stream(PROMPT, drafters=("draft_model",))


def test_what_is_wrong_with_a_stream_is_said_at_once(engine):
    with pytest.raises(InvalidRequest, match="top_p is 0"):
        engine.stream(PROMPT, top_p=0.0)
    with pytest.raises(InvalidRequest, match="prompt is 1024 tokens"):
        engine.stream([65] * 1024)
    with pytest.raises(InvalidRequest, match="max_draft_tokens is -1"):
        engine.stream(PROMPT, max_draft_tokens=-1)


def test_messages_need_a_chat_template(engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    with pytest.raises(InvalidRequest, match=r"prompt is 1 message; .* has no chat template; give a text instead"):
        engine.stream([{"role": "user", "content": "hello"}])


def test_traces_of_the_rounds_add_up_to_the_generation(engine):
    traces = []
    (generation,) = engine.generate([PROMPT], on_round=traces.append, **OPTIONS)
    accepted: dict[str, int] = {}
    for trace in traces:
        for source, count in trace.accepted.items():
            accepted[source] = accepted.get(source, 0) + count
        assert sum(trace.verified.values()) <= sum(trace.proposed.values())
        assert sum(trace.verified.values()) == len(trace.rejected) + trace.num_emitted - 1 or trace is traces[-1]
        assert min(trace.draft_s, trace.verify_s) > 0
        for deepest, num_accepted in trace.depths:
            assert 0 <= num_accepted <= deepest <= sum(trace.verified.values())
            assert num_accepted >= sum(trace.accepted.values())
    assert accepted == generation.accepted_tokens
    assert any(trace.depths for trace in traces)
    assert sum(trace.num_emitted for trace in traces) == 40
    assert generation.round_tokens == [trace.num_emitted for trace in traces if trace.num_emitted]
    assert sum(trace.rows for trace in traces) == generation.target_rows
    assert sum(sum(trace.verified.values()) for trace in traces) == generation.draft_tokens


def test_where_rounds_are_told_how_long_they_last_requests_wait_by_the_same_clock(model_dir):
    engine = LocalEngine(
        model_dir, drafters=("none",), device="cpu", kv_cache_tokens=1024, batch_size=1,
        seconds_of_rows=lambda rows: 1000.0,
    )  # fmt: skip
    engine.generate([PROMPT, PROMPT], max_new_tokens=4, ignore_eos=True)
    times = engine.core.counters.queue_time, engine.core.counters.prefill_time
    queue_s, prefill_s = ({one.name: one.value for one in time.collect()[0].samples} for time in times)
    assert queue_s["paceline_request_queue_time_seconds_sum"] == 0.0  # each begins when it is taken in
    assert prefill_s["paceline_request_prefill_time_seconds_sum"] >= 2000.0
