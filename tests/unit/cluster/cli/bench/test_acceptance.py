"""Acceptance by position and by drafter against figures counted by hand."""

import numpy as np

from actors.draft_tree import DraftTree
from actors.messages import Verdict, VerifyResult
from cluster.cli.bench.acceptance import PositionAcceptance, SourceAcceptance, count_acceptance
from cluster.router.merged_trees import MERGED_NODE, MergedTrees
from cluster.router.round import Round, RoundEntry, RoundSize
from cluster.router.trace import RoundTrace, trace_round
from cluster.router.traffic import Traffic


def trace(depths, proposed=None, verified=None, accepted=None):
    return RoundTrace(1, 1, proposed or {}, verified or {}, accepted or {}, 1, (), tuple(depths), 0.1, 0.1)


def test_acceptance_by_position_and_source_is_what_is_counted_by_hand():
    traces = [
        trace([]),  # a prompt
        trace([(3, 3)], {"suffix": 5}, {"suffix": 3}, {"suffix": 3}),
        trace([(1, 0), (4, 2)], {"suffix": 9, "lookup": 2}, {"suffix": 5, "lookup": 1}, {"lookup": 1}),
        trace([(2, 1)], {"lookup": 2, "idle": 7}, {"lookup": 2}, {"lookup": 1}),
    ]
    found = count_acceptance(traces)
    assert found.by_position == (
        PositionAcceptance(1, 4, 3, 3 / 4),
        PositionAcceptance(2, 3, 2, 2 / 3),
        PositionAcceptance(3, 2, 1, 1 / 2),
        PositionAcceptance(4, 1, 0, 0.0),
    )
    assert found.by_source == {
        "idle": SourceAcceptance(7, 0, 0, None),
        "lookup": SourceAcceptance(4, 3, 2, 2 / 3),
        "suffix": SourceAcceptance(14, 8, 3, 3 / 8),
    }
    assert count_acceptance([]).by_position == ()


def entry(seq_id, parents, num_verified, node_start):
    tree = np.array(parents, dtype=np.int32)
    return RoundEntry(
        sequence=None,
        seq_id=seq_id,
        num_tokens=5,
        rows=1,
        max_nodes=8,
        emits=True,
        is_coupled=True,
        target_known=4,
        proposals=[(0, DraftTree(tree, tree, np.ones(len(tree), np.float32)))],
        tree=DraftTree(np.arange(len(tree), dtype=np.int32) + 10, tree, np.ones(len(tree), np.float32)),
        num_verified=num_verified,
        node_start=node_start,
        node_end=node_start + len(tree),
    )


def test_a_trace_has_the_depth_of_every_sequences_tree_and_of_its_accepted_path():
    entries = [
        entry(1, [-1, -1, 0, 2, 1], 5, 0),  # two branches, 3 and 2 deep; the shallow one is right
        entry(2, [-1, 0, 1], 2, 5),  # the third node was not computed; nothing is right
        entry(3, [], 0, 8),  # no drafts
    ]
    nodes = np.zeros(8, MERGED_NODE)
    nodes["sources"] = 1
    chosen = MergedTrees(np.array([0, 5, 8, 8], np.int32), nodes)
    round = Round(7, 0.0, entries, [], RoundSize(3, 3, 3), Traffic(), chosen=chosen)
    paths = {1: [1, 4], 2: [], 3: []}
    verdicts = [Verdict(seq, 5, 1, 99, np.array(path, dtype=np.int32)) for seq, path in paths.items()]
    result = VerifyResult(7, verdicts, rows=10)
    found = trace_round(round, result, [], source_names=("suffix",), draft_s=0.1, verify_s=0.2)
    assert found.depths == ((3, 2), (2, 0))
    assert found.rejected == (10, 12, 13, 10, 11)
    assert found.proposed == {"suffix": 8}
    assert found.verified == {"suffix": 7}
