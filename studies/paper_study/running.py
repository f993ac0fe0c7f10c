"""One stage after the other, each in a process of its own, as far as the time goes."""

import subprocess
import sys
import time
from collections.abc import Sequence

from blockpilot.core.errors import BlockPilotError
from paper_study.plan import Stage, list_pending

_GRACE = 120.0  # seconds that a verb has to save what it has
_LEAST = 20.0  # seconds below which no stage is begun
_TERMINATED = 143


class StageError(BlockPilotError):
    """A stage failed; it has said why."""


def run_stages(stages: Sequence[Stage], minutes: float | None) -> Stage | None:
    """Run what is left. The stage that was stopped or not begun because time was up; None: all are finished."""
    end = None if minutes is None else time.monotonic() + 60 * minutes
    pending = list_pending(stages)
    for place, stage in enumerate(pending, start=1):
        left = None if end is None else end - time.monotonic()
        if left is not None and left < _LEAST:
            return stage
        print(f"[{place}/{len(pending)}] {stage.name}", file=sys.stderr, flush=True)
        if not run_command(stage.words, left):
            return stage
        if not stage.is_finished:
            raise StageError(f"stage {stage.name!r} ended without {stage.product}")
    return None


def run_command(words: Sequence[str], seconds: float | None) -> bool:
    """Whether it came to its end in time. Verbs that are stopped keep what they have done."""
    with subprocess.Popen([sys.executable, *words], stdout=sys.stderr) as process:
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
            return False
        except KeyboardInterrupt:
            process.wait(_GRACE)  # it got the same signal
            raise
    if code:
        raise StageError(f"a stage failed with exit code {code}; the same command goes on behind what is finished")
    return True
