"""A router of a target that verifies chains only: what it sends are chains, whatever is proposed."""

import numpy as np

from actors.draft_tree import DraftTree
from actors.drafters.contract import CpuDrafter
from actors.drafters.lookahead import LookaheadDrafter
from actors.messages import DraftResult, VerifyBatch, VerifyResult
from cluster.config import RouterConfig, SpeculationConfig
from cluster.router.worker_drafting import DraftShape
from paceline_testing.rounds import serve, texts_of, toy_core, toy_info, toy_request, toy_round
from paceline_testing.toy_target import ToyTarget, Wheel

VOCAB = 89


class Branching(CpuDrafter):
    """Proposes the right token and a wrong one at each of three steps."""

    name = "suffix"

    def __init__(self, target: ToyTarget) -> None:
        self._target = target

    def propose(self, contexts):
        trees = []
        for context in contexts:
            tokens, parents, above, told = [], [], -1, context.tokens.tolist()
            for _ in range(3):
                right = self._target.next_token(told)
                tokens += [(right + 1) % VOCAB, right]
                parents += [above, above]
                above, told = len(tokens) - 1, [*told, right]
            confidence = np.array([0.4, 0.6] * 3, np.float32)
            trees.append(DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), confidence))
        return trees


def served(core, target: ToyTarget) -> tuple[dict[str, list[int]], list[VerifyBatch]]:
    batches: list[VerifyBatch] = []

    def verify(batch: VerifyBatch) -> VerifyResult:
        batches.append(batch)
        return target.verify(batch)

    return texts_of(serve(core, verify)), batches


def test_of_a_tree_the_best_path_is_sent_and_accepted():
    target = ToyTarget(VOCAB, seconds=lambda rows: 0.01 + 1e-6 * rows)
    requests = [toy_request(f"r{index}", (index + 1, 7)) for index in range(3)]
    speculation = SpeculationConfig(drafters=("suffix",))
    for chain_only in (False, True):
        info = toy_info(VOCAB, chain_only=chain_only)
        core = toy_core(info, *requests, drafters={"suffix": Branching(target)}, speculation=speculation)
        texts, batches = served(core, target)
        assert texts == {one.request_id: target.complete(one)[0] for one in requests}
        trees = [item.tree for batch in batches for item in batch.items if len(item.tree) > 1]
        assert trees
        assert all(tree.is_chain for tree in trees) == chain_only
    assert core.counters.accepted_tokens["suffix"] == core.counters.draft_tokens > 60


def test_no_drafter_gets_rows_of_its_own_beside_the_drafts():
    target = Wheel(VOCAB, seconds=lambda rows: 0.01 + 1e-6 * rows)
    one = toy_request(prompt=(4, 9, 40, 62, 77, 23, 1))
    speculation = SpeculationConfig(drafters=("lookahead",))
    info = toy_info(VOCAB, chain_only=True)
    core = toy_core(info, one, drafters={"lookahead": LookaheadDrafter()}, speculation=speculation)
    texts, batches = served(core, target)
    assert texts["r"] == target.complete(one)[0]
    assert all(item.tree.is_chain for batch in batches for item in batch.items)


def test_draft_workers_are_asked_for_chains_and_no_round_is_sent_ahead():
    target = ToyTarget(VOCAB)
    core = toy_core(
        toy_info(VOCAB, chain_only=True),
        toy_request(),
        config=RouterConfig(send_ahead="on"),
        speculation=SpeculationConfig(drafters=("draft_model",)),
        draft_shapes={"draft": DraftShape(gamma=4, branch=3)},
    )
    core.set_draft_workers(["d"])
    branches = []

    def draft(worker, batch):
        branches.extend(item.branch for item in batch.items)
        seq_ids = [item.delta.seq_id for item in batch.items]
        return DraftResult(batch.round_id, seq_ids, [DraftTree.empty()] * len(seq_ids))

    for _ in range(6):
        toy_round(core, target.verify, draft=draft)
    assert set(branches) == {1}
    assert not core.ahead.is_on
