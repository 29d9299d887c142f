"""When Ray Serve starts and stops draft workers and target groups."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cache_service.options import Options


class AutoscalingConfig(Options):
    """When workers come and go: draft workers, from `draft.workers` to `draft.max_workers`, by what they and the
    routers say of drafting; target groups, from `target.groups` to `target.max_groups`, by how long requests wait for
    one. See `actors.workers.draft_policy` and `actors.workers.target_policy`."""

    draft_busy_share: Annotated[float, Field(gt=0, le=1)] = 0.6  # of a draft worker's time, in drafting
    draft_late_share: Annotated[float, Field(ge=0, le=1)] = 0.05  # of the drafts waited for, that may come too late
    draft_min_gain: Annotated[float, Field(ge=0, le=0.5)] = 0.03  # tokens a second, relative, of one worker more
    target_queue_s: Annotated[float, Field(gt=0, le=3600)] = 1.0  # that requests may wait for their first round
    target_used_share: Annotated[float, Field(gt=0, le=0.95)] = 0.7  # of the groups' room, that they should have in use
    look_back_s: Annotated[float, Field(ge=1, le=3600)] = 30.0  # signals are means over this time
    upscale_delay_s: Annotated[float, Field(ge=0, le=86_400)] = 30.0  # that they must have asked for more
    downscale_delay_s: Annotated[float, Field(ge=0, le=86_400)] = 300.0
