"""What the requests of a batch decide together.

A GPU pads a check to its largest tree: if each request took as many nodes as pay for it alone, all would pay for the
one that takes most. So the requests of a batch share a memory, a gate, a draft size and a number of nodes, decided once
in a round from what the rounds before have brought. Each still grows the tree that is best for itself.
"""

from dataclasses import dataclass, field

from blockpilot.pilots.forecast import Recent
from blockpilot.pilots.gate import Gate


@dataclass
class Together:
    recent: Recent = field(default_factory=Recent)
    gate: Gate = field(default_factory=Gate)
    draft_size: int = 0
    num_nodes: int = 0
    _asked: set[int] = field(default_factory=set)  # requests that have asked in this round

    def begins_round(self, request: int) -> bool:
        """Whether this request is the first to ask: no other has, or it has itself."""
        is_first = not self._asked or request in self._asked
        if is_first:
            self._asked.clear()
        self._asked.add(request)
        return is_first
