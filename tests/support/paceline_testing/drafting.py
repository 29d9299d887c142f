"""The paths of a draft tree, trees to verify, and the forwards of a draft model."""

from collections.abc import Sequence

import numpy as np

from actors.draft_model.draft_engine import DraftEngine
from actors.draft_tree import DraftTree, TopProbs

Path = tuple[int, ...]  # tokens from below the root


def paths_of(tree: DraftTree) -> list[Path]:
    """By node. Parents come before children, siblings have distinct tokens."""
    paths: list[Path] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        assert parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return paths


def tree_to_verify(
    token_ids: Sequence[int] | np.ndarray, parents: Sequence[int] | np.ndarray, probs: TopProbs | None = None
) -> DraftTree:
    """A tree whose confidences are 0: what the target computes does not depend on them."""
    return DraftTree(
        np.asarray(token_ids, np.int32), np.asarray(parents, np.int32), np.zeros(len(token_ids), np.float32), probs
    )


def count_forwards(engine: DraftEngine) -> list[int]:
    """Rows of every forward from now on."""
    rows: list[int] = []
    forward = engine._runner.forward

    def counting(batch, logit_rows):
        rows.append(batch.num_rows)
        return forward(batch, logit_rows)

    engine._runner.forward = counting
    return rows
