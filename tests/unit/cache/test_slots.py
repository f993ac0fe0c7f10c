"""KV slots: rows appended behind the committed ones, the accepted path kept, everything else forgotten."""

import pytest
import torch
from torch import Tensor

from blockpilot.cache.slots import SlotCache
from blockpilot.core.errors import BlockPilotError
from tests.tiny import make_cache

NUM_LAYERS, HEADS, HEAD_DIM, CAPACITY = 2, 3, 4, 10


def cache_of(num_slots: int = 2) -> SlotCache:
    return make_cache(
        num_layers=NUM_LAYERS, num_slots=num_slots, num_kv_heads=HEADS, head_dim=HEAD_DIM, capacity=CAPACITY
    )


def append_rows(cache: SlotCache, slot: int, count: int) -> tuple[Tensor, Tensor]:
    """Append random rows in every layer; returns keys and values [layers, count, heads, dim]."""
    cache.append(slot, count)
    keys, values = torch.randn(2, NUM_LAYERS, count, HEADS, HEAD_DIM)
    for layer in range(NUM_LAYERS):
        cache.write(layer, slot, keys[layer], values[layer])
    return keys, values


def committed(cache: SlotCache, slot: int) -> Tensor:
    """Committed rows [layers, 2, heads, length, dim]."""
    return cache.rows[:, :, slot, :, : cache.lengths[slot]]


def as_stored(keys: Tensor, values: Tensor) -> Tensor:
    return torch.stack((keys, values), dim=1).transpose(2, 3)


def test_write_returns_every_filled_row() -> None:
    cache = cache_of()
    keys, values = append_rows(cache, 0, 3)
    cache.keep(0, range(3))
    assert cache.append(0, 2) == 3
    fresh = torch.randn(2, HEADS, HEAD_DIM)
    seen_keys, seen_values = cache.write(1, 0, fresh, -fresh)
    torch.testing.assert_close(seen_keys[0], torch.cat((keys[1], fresh)).transpose(0, 1), rtol=0, atol=0)
    torch.testing.assert_close(seen_values[0], torch.cat((values[1], -fresh)).transpose(0, 1), rtol=0, atol=0)


@pytest.mark.parametrize("path", [(), (0,), (0, 1, 2), (1,), (0, 2, 5), (0, 3, 4), (2, 3, 4, 5)])
def test_keep_gathers_the_path_into_contiguous_rows_of_every_layer(path: tuple[int, ...]) -> None:
    cache = cache_of()
    first = as_stored(*append_rows(cache, 1, 2))
    cache.keep(1, (0, 1))
    drafted = as_stored(*append_rows(cache, 1, 6))
    cache.keep(1, path)
    expected = torch.cat((first, drafted[:, :, :, list(path)]), dim=3)
    torch.testing.assert_close(committed(cache, 1), expected, rtol=0, atol=0)


def test_slots_do_not_touch_each_other() -> None:
    cache = cache_of()
    first = as_stored(*append_rows(cache, 0, 4))
    cache.keep(0, range(4))
    append_rows(cache, 1, 7)
    cache.keep(1, (0, 6))
    torch.testing.assert_close(committed(cache, 0), first, rtol=0, atol=0)


def test_append_again_drops_open_rows() -> None:
    cache = cache_of()
    append_rows(cache, 0, 5)
    second = as_stored(*append_rows(cache, 0, 2))
    cache.keep(0, (0, 1))
    torch.testing.assert_close(committed(cache, 0), second, rtol=0, atol=0)


def test_a_slot_given_out_again_is_empty() -> None:
    cache = cache_of(num_slots=1)
    slot = cache.reserve()
    append_rows(cache, slot, 3)
    cache.keep(slot, range(3))
    cache.free(slot)
    assert cache.num_free == 1
    assert cache.reserve() == slot
    assert cache.append(slot, 1) == 0


def test_reserve_hands_out_every_slot_once_then_fails() -> None:
    cache = cache_of(num_slots=3)
    assert sorted(cache.reserve() for _ in range(3)) == [0, 1, 2]
    with pytest.raises(BlockPilotError, match="no free KV slot"):
        cache.reserve()


def test_free_twice_fails() -> None:
    cache = cache_of()
    slot = cache.reserve()
    cache.free(slot)
    with pytest.raises(BlockPilotError, match=f"slot {slot} was freed twice"):
        cache.free(slot)
    assert cache.num_free == 2


def test_append_beyond_the_capacity_names_both_numbers() -> None:
    cache = cache_of()
    cache.append(0, CAPACITY)
    cache.keep(0, range(CAPACITY))
    with pytest.raises(BlockPilotError, match=r"holds 10 rows; 10 \+ 1"):
        cache.append(0, 1)


@pytest.mark.parametrize("path", [(3,), (0, 3), (2, 1), (0, 0), (-1,), (0, 5, 2)])
def test_a_path_outside_the_open_rows_or_out_of_order_is_refused(path: tuple[int, ...]) -> None:
    cache = cache_of()
    append_rows(cache, 0, 3)
    with pytest.raises(BlockPilotError, match="3 open rows"):
        cache.keep(0, path)
    assert cache.lengths[0] == 0


def test_open_rows_can_be_kept_only_once() -> None:
    cache = cache_of()
    append_rows(cache, 0, 3)
    cache.keep(0, (0,))
    with pytest.raises(BlockPilotError, match="0 open rows"):
        cache.keep(0, (1,))


def test_extend_is_append_and_keep() -> None:
    cache = cache_of()
    assert [cache.extend(1, 3), cache.extend(1, 4)] == [0, 3]
    assert cache.lengths == [0, 7] and cache.appended == [0, 0]
    with pytest.raises(BlockPilotError, match=r"7 \+ 4 do not fit"):
        cache.extend(1, 4)


def test_rewind_forgets_rows_kept_on_trial() -> None:
    cache = cache_of()
    kept = as_stored(*append_rows(cache, 0, 3))
    cache.keep(0, range(3))
    append_rows(cache, 0, 4)
    cache.keep(0, range(4))
    cache.rewind(0, 3)
    torch.testing.assert_close(committed(cache, 0), kept, rtol=0, atol=0)
    assert cache.append(0, 1) == 3


@pytest.mark.parametrize("length", [-1, 4])
def test_rewind_goes_backwards_only(length: int) -> None:
    cache = cache_of()
    append_rows(cache, 0, 3)
    cache.keep(0, range(3))
    with pytest.raises(BlockPilotError, match=f"has 3 rows and cannot go back to {length}"):
        cache.rewind(0, length)
