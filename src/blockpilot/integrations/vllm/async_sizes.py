"""Sizes under asynchronous scheduling. Written by vLLM's source, never run.

There the next step is scheduled before its draft exists: no score and no acceptance is known in time. Sizes that do not
change are: `ar` and `fixed:B` work here, per request too, and other pilots do not.
"""

from collections.abc import Callable
from typing import Any

from blockpilot.core.errors import InputError
from blockpilot.integrations.vllm.settings import KEY, logger
from blockpilot.pilots.base import Pilot
from blockpilot.pilots.fixed import FixedPilot, PlainPilot


class AsyncSizes:
    def __init__(self, scheduler: Any, load: Callable[[object], Pilot]) -> None:
        self.scheduler, self.load = scheduler, load
        self.configured = fixed_size(load(None))
        self._has_reported = False
        self._update: Callable[[Any], None] = scheduler._update_after_schedule
        scheduler._update_after_schedule = self.update_after_schedule

    def update_after_schedule(self, scheduler_output: Any) -> None:
        self._update(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            if not request.is_prefill_chunk:
                request.spec_token_ids = request.spec_token_ids[: self._size(request) - 1]

    def _size(self, request: Any) -> int:
        params = request.sampling_params
        override = (params.extra_args or {}).get(KEY) if params is not None else None
        if override is None:
            return self.configured
        try:
            return fixed_size(self.load(override))
        except InputError as error:
            if not self._has_reported:
                self._has_reported = True
                logger.error("%s. Its request drafts like the others. Further ones are not reported.", error)
            return self.configured


def fixed_size(pilot: Pilot) -> int:
    if isinstance(pilot, PlainPilot):
        return 1
    if isinstance(pilot, FixedPilot):
        return pilot.block_size
    raise InputError(f"pilot {pilot.name!r} decides after the draft: start vLLM with --no-async-scheduling")
