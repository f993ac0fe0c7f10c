"""Any interleaving of reserve, append, keep and free behaves like plain lists of rows."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from tests.tiny import make_cache

NUM_SLOTS, CAPACITY, NUM_LAYERS = 3, 12, 2


class SlotMachine(RuleBasedStateMachine):
    """Every row holds one number of its own, so a row that moved or went missing shows."""

    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache(
            num_layers=NUM_LAYERS, num_slots=NUM_SLOTS, num_kv_heads=1, head_dim=1, capacity=CAPACITY
        )
        self.committed: dict[int, list[int]] = {}
        self.open: dict[int, list[int]] = {}
        self.next_value = 0

    @precondition(lambda self: len(self.committed) < NUM_SLOTS)
    @rule(target=slots)
    def reserve(self) -> int:
        slot = self.cache.reserve()
        assert slot not in self.committed
        self.committed[slot], self.open[slot] = [], []
        return slot

    @rule(slot=slots, count=st.integers(1, 6))
    def append(self, slot: int, count: int) -> None:
        if len(self.committed[slot]) + count > CAPACITY:
            return
        values = list(range(self.next_value, self.next_value + count))
        self.next_value += count
        assert self.cache.append(slot, count) == len(self.committed[slot])
        rows = torch.tensor(values, dtype=torch.float32).view(count, 1, 1)
        for layer in range(NUM_LAYERS):
            self.cache.write(layer, slot, rows, -rows)
        self.open[slot] = values

    @rule(slot=slots, data=st.data())
    def keep(self, slot: int, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.booleans(), min_size=len(self.open[slot]), max_size=len(self.open[slot])))
        path = [row for row, is_kept in enumerate(chosen) if is_kept]
        self.cache.keep(slot, path)
        self.committed[slot] += [self.open[slot][row] for row in path]
        self.open[slot] = []

    @rule(slot=consumes(slots))
    def free(self, slot: int) -> None:
        self.cache.free(slot)
        del self.committed[slot], self.open[slot]

    @invariant()
    def rows_are_those_of_the_lists(self) -> None:
        assert self.cache.num_free == NUM_SLOTS - len(self.committed)
        for slot, values in self.committed.items():
            assert self.cache.lengths[slot] == len(values)
            for layer in range(NUM_LAYERS):
                keys, negated = self.cache.rows[layer, :, slot, 0, : len(values), 0].tolist()
                assert keys == values
                assert negated == [-value for value in values]


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
