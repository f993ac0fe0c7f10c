"""All requests of a step at once.

Requests of one step may have different pilots. Those whose pilots are of one team are handed over together, in their
order, so that a pilot can decide for all of them in one call of compiled code. The decisions are those that `choose`
and `select_tree` make one by one.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from blockpilot.core.tree import DraftTree
from blockpilot.pilots.base import Asked, Drafted

Request = TypeVar("Request")
Answer = TypeVar("Answer")


def choose_sizes(requests: Sequence[Asked]) -> list[int]:
    """The draft size that each request's pilot chooses."""
    if len(requests) == 1:  # the shortest way: a request that is alone waits for every microsecond
        pilot, inputs = requests[0]
        return [pilot.choose(inputs)]
    return in_groups(requests, [asked[0].team for asked in requests], lambda team: team[0][0].choose_sizes(team))


def select_trees(requests: Sequence[Drafted]) -> list[DraftTree]:
    """The tree that each request's pilot selects."""
    if len(requests) == 1:
        pilot, inputs, candidates, anchor_id = requests[0]
        return [pilot.select_tree(inputs, candidates, anchor_id)]
    return in_groups(requests, [drafted[0].team for drafted in requests], lambda team: team[0][0].select_trees(team))


def in_groups(
    requests: Sequence[Request],
    marks: Sequence[object],
    answer: Callable[[Sequence[Request]], list[Answer]],
) -> list[Answer]:
    """Answers in the order of the requests, given at once to all that have the same mark."""
    if not requests:
        return []
    names = list(map(id, marks))
    if names.count(names[0]) == len(names):  # nearly always
        return answer(requests)
    groups: dict[int, list[int]] = {}
    for place, mark in enumerate(names):
        groups.setdefault(mark, []).append(place)
    found: dict[int, Answer] = {}
    for places in groups.values():
        found.update(zip(places, answer([requests[place] for place in places]), strict=True))
    return [found[place] for place in range(len(requests))]
