"""Whether to draft at all."""

from collections.abc import Callable
from dataclasses import dataclass

LEAVE, RETURN = 0.97, 1.03  # speed of drafting over plain decoding below which it ends, above which it begins again
FIRST_WAIT, LAST_WAIT = 8, 64  # plain steps between probes; doubled after each that fails


@dataclass
class Gate:
    """Closes where drafting loses to plain decoding, probes ever more rarely, and opens again."""

    is_closed: bool = False
    wait: int = FIRST_WAIT
    num_plain: int = 0  # steps since the gate closed or the last probe

    def is_open(self, advantage: float, limit: Callable[[], float]) -> bool:
        """`advantage`: expected speed of drafting over plain decoding; `limit`: the same if every node were right."""
        if self.is_closed and advantage > RETURN:
            self.is_closed, self.wait = False, FIRST_WAIT
        elif not self.is_closed and advantage < LEAVE:
            self.is_closed, self.num_plain = True, 0
        if not self.is_closed:
            return True
        if self.num_plain >= self.wait and limit() > RETURN:
            self.num_plain, self.wait = 0, min(2 * self.wait, LAST_WAIT)
            return True
        self.num_plain += 1
        return False
