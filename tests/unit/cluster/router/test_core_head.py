"""The target's head as a source of drafts: its trees serve the round they were grown for and no other
(`cluster.router.head_drafting`)."""

import msgspec
import numpy as np
import pytest

from actors.draft_tree import DraftTree
from actors.messages import GenerationRequest, SamplingParams
from cluster.config import RouterConfig, SpeculationConfig
from cluster.router.core import RouterCore
from paceline_testing.rounds import serve as toy_serve
from paceline_testing.rounds import texts_of, toy_core, toy_info, toy_request, toy_round
from paceline_testing.toy_target import ToyTarget

VOCAB_SIZE = 50


class TargetWithHead(ToyTarget):
    """A toy target whose head knows what it will say next; `spoil` changes what the head sends along."""

    def __init__(self, spoil=lambda result: result, head_s: float = 0.0) -> None:
        super().__init__(VOCAB_SIZE)
        self.spoil = spoil
        self.head_s = head_s
        self.asked: list[dict[int, int]] = []
        self.known: dict[int, list[int]] = {}

    def verify(self, batch):
        for item in batch.items:
            delta = item.delta
            self.known[delta.seq_id] = self.known.get(delta.seq_id, [])[: delta.start] + delta.token_ids.tolist()
        result = super().verify(batch)
        items = {item.delta.seq_id: item for item in batch.items}
        self.asked.append({seq_id: item.head_nodes for seq_id, item in items.items()})
        drafted, drafts = [], []
        for verdict in result.verdicts:
            item = items[verdict.seq_id]
            if verdict.next_token >= 0 and item.head_nodes > 0:
                text = [*self.known[verdict.seq_id], *item.tree.token_ids[verdict.path].tolist(), verdict.next_token]
                drafted.append(verdict.seq_id)
                drafts.append(chain(self.text_after(text, item.head_nodes)))
        asked = any(item.head_nodes > 0 for item in batch.items)
        result = msgspec.structs.replace(
            result,
            drafted_seq_ids=drafted,
            drafts=drafts,
            head_s=self.head_s if asked else 0.0,
            head_forwards=max(map(len, drafts), default=0),
        )
        return self.spoil(result)


def chain(tokens: list[int]) -> DraftTree:
    return DraftTree.chain(np.array(tokens, np.int32), np.full(len(tokens), 0.9, np.float32))


def make_core(*requests: GenerationRequest, max_prefill_rows: int = 512, **options) -> RouterCore:
    speculation = SpeculationConfig(drafters=("eagle",), **options)
    config = RouterConfig(max_prefill_rows=max_prefill_rows)
    return toy_core(toy_info(VOCAB_SIZE, has_head=True), *requests, config=config, speculation=speculation)


def serve(core: RouterCore, target: TargetWithHead) -> dict[str, list[int]]:
    return texts_of(toy_serve(core, target.verify))


def truth(prompt=(1, 2, 3)) -> list[int]:
    return TargetWithHead().text_after(prompt, 40)


def test_its_trees_are_verified_in_the_round_that_follows():
    core, target = make_core(toy_request()), TargetWithHead()
    core.add(toy_request("s", (4, 5)), 0.0)
    assert serve(core, target) == {"r": truth(), "s": truth((4, 5))}
    assert core.counters.accepted_tokens["eagle"] > 40
    assert core.counters.rounds < 30
    assert not core.counters.invalid_trees


def test_it_is_never_asked_for_more_than_can_be_emitted_and_not_at_all_by_others():
    core, target = make_core(max_draft_tokens=8), TargetWithHead()
    core.add(toy_request(max_new_tokens=6), 0.0)
    core.add(toy_request("plain", drafters=()), 0.0)
    core.add(toy_request("rejecting", sampling=SamplingParams(seed=1, temperature=0.0, acceptance="rejection")), 0.0)
    serve(core, target)
    first = target.asked[0]
    # Of 6 tokens one comes of this round and one of the next.
    assert sorted(first.values()) == [-1, 4, 8]
    assert all(sum(nodes >= 0 for nodes in asked.values()) <= 2 for asked in target.asked)


def test_prompts_are_shown_to_it_in_every_round():
    core, target = make_core(toy_request(prompt=[7] * 40), max_prefill_rows=16), TargetWithHead()
    serve(core, target)
    assert [next(iter(asked.values())) for asked in target.asked[:3]] == [0, 0, 16]


def with_trees(change):
    """Spoils every tree of a result."""
    return lambda result: msgspec.structs.replace(result, drafts=[change(tree) for tree in result.drafts])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda result: msgspec.structs.replace(result, drafts=[]),
        lambda result: msgspec.structs.replace(result, drafted_seq_ids=[seq + 1 for seq in result.drafted_seq_ids]),
        with_trees(lambda tree: chain([VOCAB_SIZE])),
        with_trees(lambda tree: DraftTree(tree.token_ids, tree.parents[::-1].copy(), tree.confidence)),
        with_trees(lambda tree: DraftTree(tree.token_ids, tree.parents[:1], tree.confidence)),
        with_trees(lambda tree: chain([3, 4, 5])),
    ],
    ids=["too few", "of others", "beyond the vocabulary", "children first", "of other lengths", "wrong"],
)
def test_what_it_sends_wrong_costs_its_drafts_and_nothing_else(spoil):
    core, target = make_core(toy_request()), TargetWithHead(spoil)
    assert serve(core, target) == {"r": truth()}
    assert core.counters.accepted_tokens["eagle"] < 5


def test_a_tree_grown_behind_other_tokens_is_dropped_and_one_whose_round_was_lost_is_used_again():
    core, target = make_core(toy_request()), TargetWithHead()
    toy_round(core, target.verify)
    for _ in range(2):  # the first of them is abandoned
        round, _ = core.plan_round(0.1)
        core.draft_locally(round)
        assert [source for source, _ in round.entries[0].proposals] == [0]
        core.abandon_round(round)
    sequence = next(iter(core._requests.by_id.values()))
    sequence.append([5])
    round, _ = core.plan_round(0.2)
    core.draft_locally(round)
    assert round.entries[0].proposals == []


def test_a_head_that_takes_longer_than_it_saves_is_asked_ever_more_seldom():
    slow, quick = TargetWithHead(head_s=10.0), TargetWithHead(head_s=1e-4)
    asked = {}
    for target in (slow, quick):
        core = make_core()
        for number in range(6):
            core.add(toy_request(f"r{number}"), 0.0)
            assert serve(core, target)[f"r{number}"] == truth()
        asked[target] = sum(any(nodes > 0 for nodes in asked.values()) for asked in target.asked) / len(target.asked)
        assert core.counters.head_s > 0
    assert asked[slow] < 0.25 < 0.6 < asked[quick]
    # Its time is no part of the target's: the planner's curve does not see it.
    assert core.step_times.seconds(1) < 1.0


def one_pass(result):
    return msgspec.structs.replace(result, head_is_parallel=True)


@pytest.mark.parametrize("spoil", [lambda result: result, one_pass], ids=["a level a forward", "one pass"])
def test_a_level_must_bring_the_more_the_more_it_costs(spoil):
    """How many sure nodes a level must have, as the head is told once the router knows what it costs. The target takes
    10 ms. A level costs a one-pass head nothing."""
    told = []
    for head_s in (0.0, 1e-4, 3e-4, 1e-3, 3e-3):
        core, target = make_core(), TargetWithHead(spoil, head_s)
        told.append(0.0)
        for number in range(3):
            core.add(toy_request(f"r{number}"), 0.0)
            while (outcome := toy_round(core, target.verify, number)).round is not None:
                if outcome.round.asked.head:
                    worth = outcome.round.asked.head_worth
                    told[-1] = 1.0 / float(worth[-1]) if len(worth) else 0.0
    assert told == sorted(told)
    if spoil is one_pass:
        assert told[-1] == 0.0
    else:
        assert told[0] < told[1] < told[-1]


@pytest.mark.parametrize("always", [False, True])
def test_what_launches_of_a_new_shape_take_is_not_learnt_unless_all_are_new(always):
    def spoil(result):
        is_new = always or len(target.asked) % 4 == 0
        head_s = 1.0 if is_new else 1e-3
        return msgspec.structs.replace(result, head_s=head_s, head_is_new_shape=is_new)

    core, target = make_core(), TargetWithHead(spoil)
    core._drafting.head._new_in_a_row = 60  # some come again in time, or four more are enough
    traffic = None
    for number in range(4):
        core.add(toy_request(f"r{number}"), 0.0)
        while (outcome := toy_round(core, target.verify, number)).round is not None:
            traffic = outcome.round.traffic if outcome.round.asked.head else traffic
    level_s = traffic.head_depth.level_s
    assert level_s is not None
    assert level_s > 0.01 if always else level_s < 1e-3
    assert (core._choice._head_s > 0.01) == always


def right_for(count):
    """Trees whose tokens beyond the first `count` are wrong."""

    def change(tree):
        wrong = (tree.token_ids[count:] + 1) % VOCAB_SIZE
        return chain([*tree.token_ids[:count].tolist(), *wrong.tolist()])

    return with_trees(change)


def test_a_head_that_does_not_look_at_confidences_is_told_how_many_levels_pay():
    """The same number for all sequences, which every rank of a target group gets. The target takes 10 ms."""
    told = []
    for head_s in (0.0, 3e-3, 3e-2):
        core, target = make_core(), TargetWithHead(right_for(3), head_s)
        asked = []
        for name, prompt in (("r", (1, 2, 3)), ("s", (4, 5))):
            core.add(toy_request(name, prompt), 0.0)

        def verify(batch, target=target, asked=asked):
            if any(item.head_nodes > 0 for item in batch.items):
                levels = {item.head_levels for item in batch.items}
                assert len(levels) == 1
                asked.append((*levels, max(item.head_nodes for item in batch.items)))
            return target.verify(batch)

        texts_of(toy_serve(core, verify))
        assert all(0 <= levels < nodes for levels, nodes in asked)
        told.append(asked[5][0])  # what levels take is known by then
    assert told[0] > told[1] > told[2] > 0


@pytest.mark.parametrize("chunk", [512, 45])  # the prompt ends in the round, or goes on in the next one
def test_a_prompt_that_ends_in_the_round_does_not_make_the_rows_of_the_next_one_dearer(chunk):
    core, target = make_core(toy_request(max_new_tokens=80), max_prefill_rows=chunk), TargetWithHead()
    for rows in (1, 8, 32, 64, 128):  # beyond 32 rows, each takes a tenth of a forward
        for _ in range(20):
            core.step_times.observe(rows, 0.01 + 1e-5 * rows + 1e-3 * max(0, rows - 32))
    prices = []
    for number in range(3):
        if number == 2:
            core.add(toy_request("long", range(1, 50)), 0.0)
        round = toy_round(core, target.verify, number).round
        prices.append((core._choice.costs_of_drafts(round).row_price, round.asked.head_min_confidence))
    assert round.size.num_rows >= 45
    (_, usual), (here, asked) = prices[1:]
    assert here > 0.2
    assert asked < 0.1 if chunk > 50 else asked > 3 * usual
