"""Rounds on a device against rounds on the host; and that a round reads and writes what the round before it did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actors.engine.options import EngineOptions
from actors.engine.target_engine import TargetEngine
from actors.errors import LinkError
from actors.messages import (
    FREE_ROW,
    RoundMasks,
    SamplingParams,
    SequenceDelta,
    SequenceStart,
    TokenLogprobs,
    TokenMasks,
    VerifyBatch,
    VerifyItem,
)
from paceline_testing.drafting import tree_to_verify
from paceline_testing.integrity import check_integrity
from paceline_testing.tiny_models import make_tiny_model

VOCAB = 61
SAMPLINGS = [
    SamplingParams(1, temperature=0.0),
    SamplingParams(2, temperature=0.9),
    SamplingParams(3, temperature=1.3, top_p=0.8, top_k=20),
    SamplingParams(4, temperature=0.7, repetition_penalty=1.4, presence_penalty=0.5),
    SamplingParams(5, temperature=0.0, frequency_penalty=1.0, logit_bias=((7, 3.0), (9, -100.0))),
    SamplingParams(6, temperature=1.0, min_p=0.05),
]


class Rounds:
    """Random rounds of an engine: prompts in chunks, trees of any size, sequences that end. The same for a seed as long
    as the engine says the same."""

    def __init__(
        self,
        engine: TargetEngine,
        seed: int,
        samplings: list[SamplingParams],
        most_nodes: int = 9,
        masks_rows: bool = False,
        num_logprobs: int = -1,
    ) -> None:
        self.engine = engine
        self.masks_rows = masks_rows
        self.num_logprobs = num_logprobs
        self.logprobs: list[TokenLogprobs | None] = []
        self.rng = np.random.default_rng(seed)
        self.samplings = samplings
        self.most_nodes = most_nodes
        self.texts: dict[int, list[int]] = {}
        self.sent: dict[int, int] = {}
        self.prompts: dict[int, int] = {}
        self.number = 0
        self.probs: list[np.ndarray] = []  # of the successors

    def start(self, length: int) -> None:
        seq_id = len(self.prompts) + 1
        self.texts[seq_id] = self.rng.integers(0, VOCAB, length).tolist()
        self.prompts[seq_id], self.sent[seq_id] = length, 0

    def tree(self, nodes: int) -> tuple[list[int], list[int]]:
        parents = [int(self.rng.integers(-1, node)) for node in range(nodes)]
        taken: dict[int, int] = {}  # children have different tokens
        tokens = []
        for parent in parents:
            tokens.append((taken.get(parent, int(self.rng.integers(0, VOCAB))) + 1) % VOCAB)
            taken[parent] = tokens[-1]
        return tokens, parents

    def masks(self, num_rows: int) -> TokenMasks | None:
        """Rows that grammars mask, rows with one allowed token, and rows without a grammar."""
        if not self.masks_rows or self.rng.random() < 0.3:
            return None
        distinct = int(self.rng.integers(0, 4))
        index = self.rng.integers(-VOCAB, distinct or -1, num_rows, np.int32)
        index[self.rng.random(num_rows) < 0.2] = FREE_ROW
        words = self.rng.integers(-(2**31), 2**31, 2 * distinct, np.int32)
        return TokenMasks(words, index)

    def step(self, nodes: int | None = None, num_successors: int = 0) -> list[Any]:
        """What a round says: its verdicts and successors."""
        self.number += 1
        items, masks, trees = [], [], {}
        for seq_id, text in self.texts.items():
            sent = self.sent[seq_id]
            begin = None
            if not sent:
                sampling, wanted = self.samplings[seq_id % len(self.samplings)], self.num_logprobs
                begin = SequenceStart(sampling, self.prompts[seq_id], num_logprobs=wanted, num_prompt_logprobs=wanted)
            count = int(self.rng.integers(0, self.most_nodes + 1)) if nodes is None else nodes
            tokens, parents = self.tree(count)
            trees[seq_id] = tokens
            delta = SequenceDelta(seq_id, sent, np.array(text[sent:], np.int32))
            self.sent[seq_id] = len(text)
            masks.append(self.masks(1 + count))
            items.append(VerifyItem(delta, 8, tree_to_verify(tokens, parents), begin))
        batch = VerifyBatch(self.number, items, num_successors=num_successors, masks_follow=self.masks_rows)
        result = self.engine.verify(batch, lambda: RoundMasks(self.number, masks))
        check_integrity(self.engine)
        said: list[Any] = []
        for verdict in result.verdicts:
            self.logprobs += [verdict.logprobs, verdict.prompt_logprobs]
            said.append((verdict.seq_id, verdict.next_token, verdict.path.tolist(), verdict.num_nodes))
            if verdict.next_token >= 0:
                accepted = [trees[verdict.seq_id][node] for node in verdict.path]
                self.texts[verdict.seq_id] += [*accepted, verdict.next_token]
        if result.successors is not None:
            said.append(result.successors.token_ids.tolist())
            self.probs.append(result.successors.probs)
        return said


def engine_with(attention: str, device: torch.device, is_eager: bool = False) -> TargetEngine:
    model = make_tiny_model("llama", vocab_size=VOCAB, hidden_size=32)
    return TargetEngine(model.to(device), EngineOptions(128, 4, attention=attention, is_eager=is_eager))


@pytest.mark.parametrize("num_successors", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_the_device_says_what_the_host_says_for_all_kinds_of_sampling_at_once(triton_device, num_successors):
    engines = {name: engine_with(name, triton_device) for name in ("padded", "triton_tree")}
    rounds = {name: Rounds(engine, 7, SAMPLINGS) for name, engine in engines.items()}
    accepted = 0
    for number in range(4):
        for each in rounds.values():
            if number in (0, 2):
                for length in (5, 19, 2) if number == 0 else (11, 3, 4):
                    each.start(length)
        host, device = (each.step(num_successors=num_successors) for each in rounds.values())
        assert device == host
        accepted += sum(len(said[2]) for said in host if isinstance(said, tuple))
    for ours, theirs in zip(*(each.probs for each in rounds.values()), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert accepted > 0
    assert all(len(text) > each.prompts[seq_id] for seq_id, text in each.texts.items())


def test_the_device_masks_the_rows_that_the_host_masks(triton_device):
    engines = [engine_with(name, triton_device) for name in ("padded", "triton_tree")]
    rounds = [Rounds(engine, 7, SAMPLINGS, most_nodes=4, masks_rows=True) for engine in engines]
    for each in rounds:
        for length in (5, 3, 2, 4):
            each.start(length)
    for _ in range(3):
        host, device = (each.step(num_successors=2) for each in rounds)
        assert device == host


@pytest.mark.parametrize("attention", ["padded", "triton_tree"])
def test_masks_are_asked_for_once_the_rows_are_launched_and_only_where_tokens_are_drawn(triton_device, attention):
    engine = engine_with(attention, triton_device)
    done: list[str] = []
    engine._runner.model.register_forward_hook(lambda *_: done.append("rows"))

    def masks() -> RoundMasks:
        done.append("masks")
        if len(done) > 4:
            raise LinkError("they do not come")
        return RoundMasks(0, [TokenMasks(np.array([0, 1 << 5], np.int32), np.zeros(1, np.int32))])

    begin = SequenceStart(SAMPLINGS[1], 5)
    told = []
    for start, tokens, rows in ((0, [1, 2, 3, 4, 5], 3), (5, [], 9), (5, [], 9), (0, [1, 2, 3, 4, 5, 37], 9)):
        delta = SequenceDelta(1, start, np.array(tokens, np.int32))
        batch = VerifyBatch(0, [VerifyItem(delta, rows, None, None if start else begin)], masks_follow=True)
        if len(told) < 3:
            told.append([verdict.next_token for verdict in engine.verify(batch, masks).verdicts])
            continue
        with pytest.raises(LinkError):
            engine.verify(batch, masks)
    assert told == [[-1], [37], []]  # the third is stale: no rows, and no masks
    assert done == ["rows", "rows", "masks", "rows", "masks"]
    engine.clear()
    check_integrity(engine)
    with pytest.raises(ValueError, match="masks_follow is True, and there is nothing that gives the masks"):
        engine.verify(batch)


def test_the_device_gives_the_log_probabilities_that_the_host_gives(triton_device):
    engines = [engine_with(name, triton_device) for name in ("padded", "triton_tree")]
    rounds = [Rounds(engine, 7, SAMPLINGS, most_nodes=3, masks_rows=True, num_logprobs=2) for engine in engines]
    for each in rounds:
        for length in (5, 12, 2):
            each.start(length)
    for _ in range(4):
        host, device = (each.step(num_successors=2) for each in rounds)
        assert device == host
    assert sum(found is not None for found in rounds[0].logprobs) > 8
    for host, device in zip(rounds[0].logprobs, rounds[1].logprobs, strict=True):
        assert (host is None) == (device is None)
        if host is not None and device is not None:
            np.testing.assert_allclose(device.chosen, host.chosen, atol=1e-4)
            np.testing.assert_allclose(device.logprobs, host.logprobs, atol=1e-4)


def test_a_chain_under_the_rejection_rule_among_others(triton_device):
    samplings = [SamplingParams(1, temperature=0.0), SamplingParams(2, temperature=1.0, acceptance="rejection")]
    said = []
    for name in ("padded", "triton_tree"):
        rounds = Rounds(engine_with(name, triton_device), 3, samplings)
        for length in (6, 9, 4):
            rounds.start(length)
        said.append([rounds.step() for _ in range(4)])
    assert said[0] == said[1]


class Recorder(TorchDispatchMode):
    """Where the inputs of every operation lie, or which operation of the round made them."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []
        self._made: dict[int, tuple[int, int]] = {}
        self._kept: list[Any] = []  # storages, whose addresses would be taken by others

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in ("_to_copy", "to") and kwargs.get("device") == torch.device("cpu"):
            return torch.zeros(args[0].shape, dtype=args[0].dtype)  # the results
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        storages = {leaf.untyped_storage()._cdata for leaf in given}
        inputs = tuple([self._place(leaf) for leaf in tree_leaves((args, kwargs))])
        made = func(*args, **kwargs)
        for index, leaf in enumerate(tree_leaves(made)):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in storages:
                storage = leaf.untyped_storage()
                self._kept.append(storage)
                self._made.setdefault(storage._cdata, (len(self.operations), index))
        self.operations.append((str(func), inputs))
        return made

    def _place(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf if not isinstance(leaf, float) else repr(leaf)
        if leaf.device.type == "cpu":
            return "host", leaf.dtype, leaf.shape, leaf.stride()
        storage = leaf.untyped_storage()
        self._kept.append(storage)
        place = self._made.get(storage._cdata, storage._cdata)
        return place, leaf.dtype, leaf.shape, leaf.stride(), leaf.storage_offset()


def decode(rounds: Rounds, nodes: int) -> None:
    """A decoding round in which every sequence has one new token and a tree of `nodes` nodes."""
    for seq_id, text in rounds.texts.items():
        del text[rounds.sent[seq_id] :]
        text.append(int(rounds.rng.integers(0, VOCAB)))
    with Recorder():
        rounds.step(nodes)


@pytest.mark.parametrize(("masks_rows", "num_rounds"), [(False, 40), (True, 20)])
def test_launches_of_a_key_are_the_same_operations_on_the_same_places_in_all_rounds(
    monkeypatch, masks_rows, num_rounds
):
    """Within masks, the rows are launched so, and the draws follow unrecorded."""
    pytest.importorskip("triton", reason="Triton is not installed; its wheels are for Linux")
    with torch.device("meta"):
        model = make_tiny_model("llama", vocab_size=VOCAB, hidden_size=32)
    engine = TargetEngine(model, EngineOptions(4096, 4, attention="triton_tree"))
    launched: list[tuple[Any, list[tuple[Any, ...]]]] = []

    def record(inputs: Any, key: Any, launch: Any, may_record: bool) -> Any:
        with Recorder() as recorder:
            result = launch()
        launched.append(((inputs.key, key), recorder.operations))
        return result

    monkeypatch.setattr(engine._runner, "launch", record)
    samplings = [SamplingParams(1, temperature=0.8), SamplingParams(2, temperature=0.5, top_k=3)]
    rounds = Rounds(engine, 1, samplings, masks_rows=masks_rows)
    for number in range(num_rounds):
        if number < 12 and number % 3 == 0:
            rounds.start(8)
            with Recorder():
                rounds.step(0)  # the prompt
        decode(rounds, int(rounds.rng.integers(0, 4)))
    of_key: dict[Any, list[tuple[Any, ...]]] = {}
    for key, operations in launched:
        assert of_key.setdefault(key, operations) == operations, key
    assert 4 < len(of_key) < 60
    assert len(launched) > num_rounds
    assert {key is None for _, key in of_key} == {masks_rows}


def test_a_temporary_of_the_host_or_another_address_is_seen():
    with torch.device("meta"):
        first, second = torch.zeros(4), torch.zeros(4)
    seen = []
    for tensor in (first, first, second):
        with Recorder() as recorder:
            (tensor + 1) * 2
        seen.append(recorder.operations)
    assert seen[0] == seen[1] != seen[2]
