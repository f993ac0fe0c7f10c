"""What followed the same words before, and how often that came true."""

from hypothesis import given
from hypothesis import strategies as st

from blockpilot.core.draft import MAX_MATCH
from blockpilot.decoding.lookup import FADE, KEY, MAX_PLACES, Lookup


def search(history: list[int]) -> tuple[int, int]:
    """Through the whole history: where the text goes on, and how many tokens agree; (0, 0) where they never stood."""

    def agreement(end: int) -> int:
        count = 0
        while count < min(end, MAX_MATCH) and history[end - 1 - count] == history[-1 - count]:
            count += 1
        return count

    ends = [(agreement(end), end) for end in range(1, len(history))]
    if not (found := [(count, end) for count, end in ends if count]):
        return 0, 0
    most = max(count for count, _ in found)
    if most < KEY:  # of short matches the latest wins; how far it agrees by chance does not count
        return max(end for count, end in found if count == most), most
    last = [(count, end) for count, end in found if count >= KEY][-MAX_PLACES:]
    most = max(count for count, _ in last)
    return max(end for count, end in last if count == most), most


def test_copies_what_followed() -> None:
    copy = Lookup([1, 2, 3, 4, 5, 6, 9]).find(2, 4)
    assert copy is not None
    assert (copy.token_ids, copy.num_matched, copy.num_seen) == ([3, 4, 5, 6], 1, 0)


def test_the_longest_match_wins_over_later_ones() -> None:
    long, short = [9, 8, 7, 1, 2, 3, 50], [6, 1, 2, 3, 60]
    copy = Lookup([*long, *short, 9, 8, 7, 1, 2]).find(3, 1)
    assert copy is not None and (copy.token_ids, copy.num_matched) == ([50], 6)
    copy = Lookup([*long, *short, 1, 2]).find(3, 1)
    assert copy is not None and copy.token_ids == [60], "of equals the latest"


def test_nothing_follows_what_never_stood_there() -> None:
    assert Lookup([1, 2, 3]).find(9, 4) is None
    assert Lookup().find(9, 4) is None
    assert Lookup([1, 2, 1]).find(2, 0) is None


def test_a_copy_that_runs_into_the_anchor_goes_round() -> None:
    copy = Lookup([7, 4]).find(7, 7)
    assert copy is not None and copy.token_ids == [4, 7, 4, 7, 4, 7, 4]


def test_a_copy_is_compared_with_what_came() -> None:
    lookup = Lookup([1, 2, 3, 4, 5, 1])
    assert lookup.find(2, 3) is not None  # 3 4 5
    lookup.push([2, 3])
    copy = lookup.find(9, 3)  # 3 was right, 4 was not: 9 came
    assert copy is None
    lookup.push([9, 1])
    copy = lookup.find(2, 3)
    assert copy is not None and (copy.num_right, copy.num_seen) == (1, 2)
    lookup.push([2, 3, 9])
    copy = lookup.find(1, 2)  # 3 9 1 were all right
    assert copy is not None and (copy.num_right, copy.num_seen) == (FADE + 3, 2 * FADE + 3)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9), st.data())
def test_equals_a_search_through_the_history(history: list[int], most: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(history) - 1))
    lookup = Lookup(history[:cut])
    lookup.push(history[cut:-1])
    assert len(lookup) == len(history) - 1
    copy, (end, num_matched) = lookup.find(history[-1], most), search(history)
    if not end:
        assert copy is None
        return
    assert copy is not None and copy.num_matched == num_matched
    period = len(history) - end
    assert copy.token_ids == [history[end + place % period] for place in range(most)]
