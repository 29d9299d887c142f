"""Whole lives of a router under faults (`run_round`): whatever drafters, draft workers, target and clients do, every
request gets exactly the tokens that the target alone would have given it, ends once, and leaves nothing behind."""

import gc
import random
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.draft_tree import DraftTree
from actors.drafters.contract import CpuDrafter
from actors.drafters.lookahead import LookaheadDrafter
from actors.errors import DeadlineExceeded, ModelError, ObjectiveUnreachable, Overloaded
from actors.messages import GenerationRequest, SamplingParams, TokenChunk, Verdict, decode_message, encode_message
from cluster.config import Objective, ObjectivesConfig, RouterConfig, SpeculationConfig
from cluster.router.core import RouterCore
from cluster.router.worker_drafting import DraftShape
from paceline_testing.rounds import toy_info
from paceline_testing.toy_drafters import ToyDraftWorker
from paceline_testing.toy_target import ToyTarget

EOS = 3
TIGHT = ObjectivesConfig(interactive=Objective(ttft_s=0.3, tpot_s=0.02), batch=Objective(ttft_s=2.0))


class OddDrafter(CpuDrafter):
    """Drafts in one of many ways, most of them wrong, and checks what it is told."""

    WAYS = ("uniform", "right", "wrong", "eos", "out of range", "raises", "too many", "short", "shapeless", "empty")

    def __init__(self, name, way, target, seed):
        self.name = name
        self.way = way
        self.target = target
        self.random = random.Random(seed)
        self.seen = {}

    def propose(self, contexts):
        for context in contexts:
            known = self.seen.get(context.seq_id, []) if context.start else []
            assert context.start == len(known)
            assert context.tokens[: context.start].tolist() == known
            assert context.max_nodes >= 1
            assert not context.tokens.flags.writeable
            self.seen[context.seq_id] = context.tokens.tolist()
        way = self.random.choice(self.WAYS) if self.way == "any" else self.way
        if way == "raises":
            raise RuntimeError("a drafter's bug")
        trees = [self.tree(way, context) for context in contexts]
        return trees[:-1] if way == "short" else trees

    def tree(self, way, context):
        count = context.max_nodes + (3 if way == "too many" else 0)
        tokens, parents = [], []
        text = context.tokens.tolist()
        for node in range(count):
            if way == "right":
                tokens.append(self.target.next_token(text))
                text.append(tokens[-1])
                parents.append(node - 1)
                continue
            parents.append(self.random.randrange(-1, node) if node else -1)
            if way == "wrong":
                right = self.target.next_token(context.tokens.tolist())
                tokens.append((right + 1 + node) % self.target.vocab_size)
                parents[-1] = node - 1
            elif way == "eos":
                tokens.append(EOS if node % 2 == 0 else self.random.randrange(self.target.vocab_size))
            elif way == "out of range":
                tokens.append(self.random.choice([-1, self.target.vocab_size, 0]))
            else:
                tokens.append(self.random.randrange(self.target.vocab_size))
        if way == "empty":
            return DraftTree.empty()
        confidence = np.sort(np.array([self.random.random() for _ in tokens], np.float32))[::-1].copy()
        if way == "shapeless":
            confidence = confidence[:-1]
        return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), confidence)

    def observe(self, outcomes):
        for outcome in outcomes:
            assert 0 <= outcome.num_accepted <= outcome.num_proposed
        if self.way == "raises":
            raise RuntimeError("a drafter's bug")

    def forget(self, seq_id):
        self.seen.pop(seq_id, None)
        if self.way == "raises":
            raise RuntimeError("a drafter's bug")

    def memory_bytes(self):
        return sum(map(len, self.seen.values()))


class OddRequirer(OddDrafter):
    """Has rows computed, or breaks one of the rules for that, and checks what it is told of them."""

    most_required = 4
    num_successors = 2

    def tree(self, way, context):
        assert context.max_required in (0, self.most_required)
        tokens, parents, required = [], [], []
        count = context.max_required + (self.random.random() < 0.1)
        for node in range(count + self.random.randint(0, context.max_nodes)):
            parents.append(self.random.randrange(-1, node) if node else -1)
            tokens.append(node % self.target.vocab_size)  # distinct siblings
            required.append(node < count)
            if required[-1] and self.random.random() < 0.02:
                required[parents[-1]] = False
        confidence = np.zeros(len(tokens), np.float32)
        return DraftTree(
            np.array(tokens, np.int32), np.array(parents, np.int32), confidence, required=np.array(required, np.bool_)
        )

    def remember(self, rows):
        if len(rows.parents):
            assert len(rows.parents) == len(rows.contexts) == len(rows.sequences)
            for row, parent in enumerate(rows.parents.tolist()):
                assert parent < row
                if parent >= 0:
                    assert rows.sequences[parent] == rows.sequences[row]
                    assert rows.contexts[parent, 1:].tolist() == rows.contexts[row, :-1].tolist()


def drafter_of(way, index, target, seed):
    name = f"{way}{index}"
    if way == "lookahead":
        return LookaheadDrafter(window_size=3, lookahead_level=3, keep_phrases=False)
    return (OddRequirer if way == "requires" else OddDrafter)(name, way, target, seed)


class OddDraftWorker(ToyDraftWorker):
    """A draft worker that is sometimes late, wrong or forgetful."""

    def __init__(self, target, rng, is_reliable):
        super().__init__(self.mostly_right)
        self.target = target
        self.rng = rng
        self.is_reliable = is_reliable

    def mostly_right(self, tokens, count):
        drafts = list(tokens)
        for _ in range(count):
            wrong = self.rng.random() < 0.2
            drafts.append(self.rng.randrange(self.target.vocab_size) if wrong else self.target.next_token(drafts))
        return drafts[len(tokens) :]

    def draft(self, batch):
        if not self.is_reliable:
            for item in batch.items:
                if self.rng.random() < 0.1:
                    self.sequences.pop(item.delta.seq_id, None)
        result = super().draft(batch)
        self.batches.clear()
        fault = 1.0 if self.is_reliable else self.rng.random()
        if fault < 0.05:
            return None
        if fault < 0.1:
            return msgspec.structs.replace(result, round_id=batch.round_id - 1)
        if fault < 0.15:
            return msgspec.structs.replace(result, seq_ids=[*result.seq_ids, 17])
        if fault < 0.2:
            return msgspec.structs.replace(result, seq_ids=[12345 + index for index in range(len(result.seq_ids))])
        if fault < 0.25:
            odd = [DraftTree(tree.confidence, tree.parents, tree.confidence) for tree in result.trees]
            return msgspec.structs.replace(result, trees=odd)
        return decode_message(encode_message(result))


class Life:
    """A router, its target and its clients, driven by one random seed."""

    def __init__(
        self, seed, ways, *, total_blocks=400, max_running=4, max_prefill_rows=9, faults=0.0, workers=0,
        objectives=None,
    ):  # fmt: skip
        self.rng = random.Random(seed)
        self.faults = faults
        self.target = ToyTarget(
            vocab_size=13, max_model_len=60, block_size=4, total_blocks=total_blocks, eos_token_id=EOS, mean_length=25,
            seed=seed, num_cached_tokens=self.rng.choice([0, 0, 3]),
        )  # fmt: skip
        self.drafters = {f"{way}{i}": drafter_of(way, i, self.target, seed + i) for i, way in enumerate(ways)}
        self.most_required = sum(getattr(drafter, "most_required", 0) for drafter in self.drafters.values())
        self.config = RouterConfig(
            max_running=max_running, max_waiting=6, max_prefill_rows=max_prefill_rows,
            objectives=objectives or ObjectivesConfig(),
        )  # fmt: skip
        speculation = SpeculationConfig(max_draft_tokens=7, max_rows=20)
        self.pools = ("draft", "other")[: 1 + seed % 2]
        self.core = RouterCore(
            toy_info(13, 60, 4),
            self.config,
            speculation,
            self.drafters,
            draft_shapes=dict.fromkeys(self.pools, DraftShape(3)),
        )
        self.workers = {f"w{i}": OddDraftWorker(self.target, self.rng, faults == 0.0) for i in range(workers)}
        self.connect(list(self.workers))
        self.all_workers = dict(self.workers)
        self.now = 0.0
        self.rounds = 0
        self.requests = {}
        self.emitted = {}
        self.chunks = {}
        self.endings = {}
        self.cancelled = set()
        self.failed_rounds = {}  # by request, since its last chunk

    def connect(self, workers):
        """Each worker has its pool. Now and then a pool's model is another one than before."""
        for index, pool in enumerate(self.pools):
            own = [name for name in workers if int(name[1:]) % len(self.pools) == index]
            model = self.rng.choice("ab") if self.faults else "a"
            self.core.set_draft_workers(dict.fromkeys(own, model), pool)

    def request(self):
        rng = self.rng
        request = GenerationRequest(
            request_id=f"r{len(self.requests)}",
            prompt_token_ids=np.array([rng.randrange(13) for _ in range(rng.choice([1, 2, 5, 20, 40]))], np.int32),
            sampling=SamplingParams(seed=rng.randrange(1 << 63), temperature=0.0),
            max_new_tokens=rng.choice([1, 2, 7, 50]),
            stop_token_ids=rng.choice([(EOS,), (EOS, 5), ()]),
            timeout_s=rng.choice([None, None, None, 0.3]) if self.faults else None,
            drafters=rng.choice([None, None, None, ()]),
            max_draft_tokens=rng.choice([None, None, 0, 2]),
            service_class="batch" if len(self.requests) % 2 else "interactive",
            tenant="ab"[len(self.requests) % 3 % 2],
        )
        try:
            self.core.add(request, self.now)
        except ObjectiveUnreachable:
            return
        except Overloaded:
            assert self.core.num_waiting >= self.config.max_waiting
            return
        self.requests[request.request_id] = request
        self.emitted[request.request_id] = []
        self.chunks[request.request_id] = 0

    def blame(self):
        if self.core._open is not None:
            for entry in self.core._open.entries:
                request_id = entry.sequence.request_id
                self.failed_rounds[request_id] = self.failed_rounds.get(request_id, 0) + 1

    def disturb(self):
        rng = self.rng
        if rng.random() < self.faults and self.requests:
            request_id = rng.choice(list(self.requests))
            if self.core.cancel(request_id):
                assert request_id not in self.endings
                self.cancelled.add(request_id)
            else:
                assert request_id in self.endings or request_id in self.cancelled
        if rng.random() < self.faults:
            self.take(self.core.end_overdue(self.now))
        if rng.random() < self.faults and self.target._sequences:
            self.target.lose(rng.choice(list(self.target._sequences)))
        if rng.random() < self.faults / 4:
            self.target.lose_all()
            self.blame()
            self.core.target_lost()
            self.take(self.core.end_overdue(self.now))
        if rng.random() < self.faults and self.all_workers:
            chosen = rng.sample(list(self.all_workers), rng.randint(0, len(self.all_workers)))
            self.workers = {name: self.all_workers[name] for name in chosen}
            self.connect(chosen)

    def spoil(self, result):
        """A target that has gone mad over one sequence, in a way that can be told."""
        if not result.verdicts or self.rng.random() >= self.faults:
            return result
        index = self.rng.randrange(len(result.verdicts))
        good = result.verdicts[index]
        bad = self.rng.choice(
            [
                None,
                Verdict(good.seq_id, good.num_computed, 1, 13),
                Verdict(good.seq_id, good.num_computed, 1, -7),
                Verdict(good.seq_id, good.num_computed, 1, 2, np.array([0, 0], np.int32)),
                Verdict(good.seq_id, good.num_computed, 1, 2, np.array([99], np.int32)),
                Verdict(good.seq_id, good.num_computed, 1, 2, np.array([0], np.int32), num_nodes=0),
                Verdict(good.seq_id, good.num_computed, 1, 2, num_nodes=999),
                Verdict(good.seq_id, good.num_computed, 1, 2, np.array([-1], np.int32)),
                Verdict(good.seq_id, 10_000, 1, -1),
                Verdict(12345, good.num_computed, 1, 2),
            ]
        )
        verdicts = [*result.verdicts[:index], *([] if bad is None else [bad]), *result.verdicts[index + 1 :]]
        return msgspec.structs.replace(result, verdicts=verdicts)

    def step(self):
        core, rng = self.core, self.rng
        self.disturb()
        round, events = core.plan_round(self.now)
        self.take(events)
        assert core.num_running <= self.config.max_running
        num_classes = 2 if self.config.objectives.are_set else 1
        assert core.num_waiting <= num_classes * self.config.max_waiting + 2 * self.config.max_running
        self.rounds += 1
        self.now += 0.01
        if round is None:
            return
        assert sum(entry.rows for entry in round.entries if entry.rows > 1) <= self.config.max_prefill_rows
        results = {}
        for name, batch in round.asked.batches.items():
            assert all(item.max_nodes == 0 for item in batch.items) or name in round.asked.awaited
            if name in self.workers:
                results[name] = self.workers[name].draft(decode_message(encode_message(batch)))
        core.draft_locally(round)
        self.disturb()
        if round is not core._open:
            return  # the target was lost while drafts were made
        if rng.random() < self.faults / 2:
            self.blame()
            core.abandon_round(round)
            self.take(core.end_overdue(self.now))
            return
        batch = decode_message(encode_message(core.assemble(round, results)))
        assert sum(len(item.tree) for item in batch.items) <= 20
        assert all(len(item.tree) <= 7 + self.most_required for item in batch.items)
        result = self.target.verify(batch)
        self.disturb()
        if rng.random() < self.faults / 2:
            self.blame()
            if is_cleared := rng.random() < 0.5:
                self.target.lose_all()
            core.abandon_round(round, is_cleared)
            self.take(core.end_overdue(self.now))
        self.take(core.commit(round, decode_message(encode_message(self.spoil(result))), self.now))

    def take(self, events):
        for event in events:
            request_id = event.request_id
            assert request_id not in self.endings, "a request ends once"
            request = self.requests[request_id]
            right, finish = self.target.complete(request)
            if isinstance(event, TokenChunk):
                self.failed_rounds.pop(request_id, None)
                assert event.index == self.chunks[request_id]
                self.chunks[request_id] += 1
                self.emitted[request_id] += event.token_ids
                assert len(event.sources) == len(event.token_ids)
                assert event.token_ids or event.finish_reason
                if event.finish_reason is None:
                    assert event.stats is None
                    continue
                self.endings[request_id] = event.finish_reason
                if event.finish_reason == "cancelled":
                    assert request_id in self.cancelled
                else:
                    assert (self.emitted[request_id], event.finish_reason) == (right, finish)
                    self.check_stats(event, self.emitted[request_id])
            else:
                if isinstance(event.error, ModelError):
                    assert self.failed_rounds.pop(request_id) >= 4
                    self.endings[request_id] = "given up"
                else:
                    assert isinstance(event.error, DeadlineExceeded), event.error
                    assert request.timeout_s is not None
                    self.endings[request_id] = "late"
            assert self.emitted[request_id] == right[: len(self.emitted[request_id])]

    def check_stats(self, chunk, tokens):
        stats = chunk.stats
        assert stats.rounds == chunk.index + 1
        accepted = sum(stats.accepted_tokens.values())
        assert accepted <= stats.draft_tokens <= stats.target_rows
        assert stats.rounds - 1 <= len(tokens) - accepted <= stats.rounds
        request = self.requests[chunk.request_id]
        if request.drafters == () or request.max_draft_tokens == 0:
            assert stats.draft_tokens == 0

    def run(self, num_requests, most_rounds):
        tries = 0
        while tries < num_requests or self.core.has_work:
            if tries < num_requests and self.rng.random() < 0.7:
                tries += 1
                self.request()
            self.step()
            assert self.rounds < most_rounds, f"{len(self.requests) - len(self.endings)} requests starve"
        self.check_nothing_left()

    def check_nothing_left(self):
        core = self.core
        assert self.requests.keys() == self.endings.keys()
        assert not core._scheduler.held
        assert not core.num_waiting
        assert not core.has_work
        assert not core._requests.by_id
        assert not core._requests._sequences
        assert len(core._requests._deadlines) <= 64 + 2 * 64
        assert self.target.num_sequences == 0
        assert self.target.free_blocks == self.target.total_blocks
        for drafter in self.drafters.values():
            assert drafter.memory_bytes() == 0
        if not self.faults:
            assert not any(worker.sequences for worker in self.all_workers.values())


@pytest.mark.parametrize("way", OddDrafter.WAYS)
def test_output_is_the_targets_own_whatever_one_drafter_does(way):
    life = Life(5, [way])
    life.run(30, 1500)
    errors = sum(life.core.counters.drafter_errors.values())
    invalid = sum(life.core.counters.invalid_trees.values())
    assert (errors > 0) == (way in ("raises", "short"))
    assert (invalid > 0) == (way in ("out of range", "too many", "shapeless", "uniform", "eos"))
    if way == "right":
        assert life.core.counters.rounds < 0.7 * life.core.counters.emitted_tokens
        assert life.core.counters.accepted_tokens["right0"] > 0


@given(
    seed=st.integers(0, 2**32),
    ways=st.lists(st.sampled_from((*OddDrafter.WAYS, "any", "lookahead", "requires")), max_size=3),
    max_running=st.integers(1, 5),
    max_prefill_rows=st.sampled_from([1, 3, 16, 100]),
    total_blocks=st.sampled_from([17, 20, 30, 400]),
    workers=st.integers(0, 3),
    faults=st.sampled_from([0.0, 0.02, 0.1]),
    objectives=st.sampled_from([None, TIGHT]),
)
@pytest.mark.whole
@settings(max_examples=120)
def test_output_is_the_targets_own_under_any_mix_of_faults(
    seed, ways, max_running, max_prefill_rows, total_blocks, workers, faults, objectives
):
    # 17 blocks hold one sequence of 60 tokens with its largest tree, and no second.
    life = Life(
        seed, ways, total_blocks=total_blocks, max_running=max_running, max_prefill_rows=max_prefill_rows,
        workers=workers, faults=faults, objectives=objectives,
    )  # fmt: skip
    life.run(12, 4000)


@pytest.mark.parametrize("way", ["lookahead", "requires"])
def test_rows_that_are_required_change_no_output_and_take_turns(way):
    life = Life(5, [way, "right"], max_running=5)
    life.run(30, 1500)
    counters = life.core.counters
    assert counters.drafter_errors.total() == 0
    assert (counters.invalid_trees.total() > 0) == (way == "requires")
    assert counters.accepted_tokens["right1"] > 0
    assert counters.drafted_tokens[f"{way}0"] > 50


def test_scarce_blocks_preempt_the_youngest_and_everyone_still_finishes():
    life = Life(11, ["uniform", "right"], total_blocks=20, max_running=5, max_prefill_rows=50)
    life.run(40, 4000)
    assert life.core.counters.preempted > 0


@pytest.mark.whole
def test_memory_is_flat_over_hundreds_of_requests():
    life = Life(3, ["right"], max_prefill_rows=100, workers=2)

    def serve(count):
        for _ in range(count):
            while life.core.num_waiting >= 5:
                life.step()
            life.request()
        while life.core.has_work:
            life.step()
        for kept in (life.requests, life.emitted, life.chunks, life.endings, life.cancelled, life.failed_rounds):
            kept.clear()
        gc.collect()

    def held():
        """Bytes that lines of the product hold: a thread that another test has left behind is not counted."""
        own = [tracemalloc.Filter(True, f"*/{package}/*") for package in ("cluster", "actors")]
        traces = tracemalloc.take_snapshot().filter_traces([*own, tracemalloc.Filter(False, "*/site-packages/*")])
        return sum(trace.size for trace in traces.traces)

    serve(150)
    tracemalloc.start()
    try:
        serve(80)
        before = held()
        serve(400)
        after = held()
    finally:
        tracemalloc.stop()
    assert after - before < 48 * 1024
    life.check_nothing_left()


def test_a_restarted_router_names_its_sequences_anew():
    def names(seed):
        life = Life(seed, [])
        for _ in range(4):
            life.request()
        round, _ = life.core.plan_round(0.0)
        return {item.delta.seq_id for item in life.core.assemble(round, {}).items}

    first, second = names(1), names(1)
    assert not first & second
    assert all(0 <= name < 1 << 63 for name in first | second)
