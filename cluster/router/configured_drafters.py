"""Checks the drafters of a cluster's configuration, before models and corpora are loaded."""

from __future__ import annotations

from actors.drafters.registry import LOOKAHEAD, RETRIEVAL, check_options, create_drafters
from actors.errors import InvalidRequest
from cache_service.counts.soft_exchange import DELTA_BYTES
from cluster.config import NO_CACHE, ClusterConfig
from cluster.named_drafters import named_drafters
from cluster.router.cpu_drafting import check_required_rows
from cluster.router.draft_budget import USUAL_DRAFT_ROWS


def checked_drafters(config: ClusterConfig) -> tuple[str, ...]:
    """The drafters of `named_drafters`. Drafters with options or required rows are created once as a check.

    Raises InvalidRequest, also for options and values that a drafter refuses, for corpora that nothing drafts from, and
    for rows that a round has no room for.
    """
    names, speculation = named_drafters(config), config.speculation
    if speculation.corpora and RETRIEVAL not in names:
        limit = f"speculation.drafters must include {RETRIEVAL} to use it"
        raise InvalidRequest("speculation.corpora", str(speculation.corpora[0]), limit)
    options = check_options(names, speculation.drafter_options, "speculation.drafter_options")
    delta_bytes = 0 if config.cache.url == NO_CACHE else DELTA_BYTES
    made = [
        create_drafters((name,), delta_bytes=delta_bytes, options={name: options.get(name, {})})
        for name in sorted({*options, LOOKAHEAD} & set(names))
    ]
    drafters = [drafter for one in made for drafter in one.values()]
    check_required_rows(drafters, speculation.max_rows or USUAL_DRAFT_ROWS, speculation.acceptance)
    return names
