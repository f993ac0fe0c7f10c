"""What the requests of a batch decide together.

A GPU pads a check to its largest tree: if each request took as many nodes as pay for it alone, all would pay for the
one that takes most. So the requests of a batch share a memory, a gate, a draft size and a number of nodes, decided once
in a round from what the rounds before have brought. Each still grows the tree that is best for itself. When the last
request has gone, so has what they knew.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from blockpilot.pilots.forecast import Recent
from blockpilot.pilots.gate import Gate


@dataclass
class Together:
    recent: Recent = field(default_factory=Recent)
    gate: Gate = field(default_factory=Gate)
    draft_size: int = 0
    num_nodes: int = 0
    foretold: float | None = None  # tokens that these bring a request, beyond its own one; None: nothing is drafted
    batch_size: int = 0  # for which both were chosen
    num_kept: int = 0  # rounds for which they hold
    _members: list["weakref.ref[Any]"] = field(default_factory=list)  # pilots of requests
    _asked: set[int] = field(default_factory=set)  # those that have asked in this round

    def join(self, member: object) -> None:
        self._members = [known for known in self._members if known() is not None]
        if not self._members:
            self.forget()
        self._members.append(weakref.ref(member))

    def forget(self) -> None:
        self.recent, self.gate, self.num_kept, self._asked = Recent(), Gate(), 0, set()

    def find_beginner(self, members: Sequence[object]) -> int:
        """The place of the one who begins a round, of members who ask one after the other; their number: none does.

        That is the first whom no other has preceded, or who has asked before.
        """
        asking = list(map(id, members))
        place = 0
        if self._asked:
            place = next((place for place, member in enumerate(asking) if member in self._asked), len(asking))
        if place < len(asking):
            self._asked = set(asking[place:])
        else:
            self._asked.update(asking)
        return place
