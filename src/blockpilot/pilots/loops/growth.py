"""The loops of `pilots/growth.py` and `pilots/calibration.py`."""

from typing import Any, NamedTuple

import numpy as np

from blockpilot.pilots.calibration import MAX_NEGATED, MAX_PROBABILITY, MIN_LOG_PROB
from blockpilot.pilots.copies import AGREED, LEAST_OWN
from blockpilot.pilots.forecast import HEAD
from blockpilot.pilots.loops.jit import compiled, helper

ONE, LOWEST, HIGHEST = np.float32(1), np.float32(MIN_LOG_PROB), np.float32(MAX_PROBABILITY)
LIMIT = np.float32(MAX_NEGATED)
LEAST = np.float32(LEAST_OWN)
ABSENT = -ONE  # what is no child is never taken
NONE = -1


class Draft(NamedTuple):
    token_ids: Any  # [D, K]
    log_probs: Any  # [D, K]
    first: Any  # [K]
    pairwise: Any  # [D-1, K, K]
    weights: Any  # [depths, features], of a calibration; empty: scores are taken at their word
    width: Any  # candidates of a position that are looked at
    copied_ids: Any  # [M], what followed the same words before
    copied: Any  # [M], P(right | all before it right), by what the text says alone
    copied_ranks: Any  # [M], where it stands among a position's candidates; K: nowhere, so it has a place of its own


class Families(NamedTuple):
    """The probabilities of children that have been asked for. Number K is the copy's, among children where no other
    candidate is the same token, among parents in any case: what follows the whole copy so far is another family."""

    rows: Any  # [F, K + 1]
    places: Any  # [depth * (K + 1) + 1], the row of every position and parent, 0 at first; then how many are filled
    ranks: Any  # [K + 1], logarithms


class Taken(NamedTuple):
    """Nodes, the anchor first."""

    paths: Any
    parents: Any
    token_ids: Any
    depths: Any
    families: Any  # the row of each node's children
    is_copied: Any  # whether the path to it is the copy


class Opened(NamedTuple):
    """Nodes that may be taken next, by age; where there is none, or none any more, the path is negative."""

    paths: Any
    parents: Any
    ranks: Any


@helper
def _find_scores(row, draft, position, parent):  # type: ignore[no-untyped-def]
    """Log-probabilities of a parent's children into `row` [K]; the anchor is parent 0 of position 0.

    Where the drafter has not seen the parent, which is a copy, the position's own scores must do."""
    scores, width = draft.log_probs[position], draft.width
    if len(draft.first) and position == 0:
        scores = draft.first
    elif len(draft.first) and parent < width:
        scores = draft.pairwise[position - 1, parent]
    for child in range(width):
        row[child] = scores[child]


@helper
def _calibrate(row, marginals, weight, ranks, parent):  # type: ignore[no-untyped-def]
    """From a parent's scores to P(right | parent right), in `row` [K]: a logistic model of `calibration.FEATURES`."""
    best, total = LOWEST, np.float32(0)
    for child in range(len(row) - 1):
        best = max(best, row[child])
    for child in range(len(row) - 1):
        score = max(row[child], LOWEST)
        logit = score - np.log(ONE - min(np.exp(score), HIGHEST))
        value = weight[1] * logit + (weight[0] + weight[4] * ranks[child] + weight[5] * ranks[parent])
        value += weight[2] * max(marginals[child], LOWEST)
        value += weight[3] * (best - score)
        row[child] = ONE / (ONE + np.exp(min(-value, LIMIT)))
    for child in range(len(row) - 1):
        total += row[child]
    if total > ONE:  # siblings exclude each other
        for child in range(len(row) - 1):
            row[child] /= total


@helper
def _add_copy(row, draft, position):  # type: ignore[no-untyped-def]
    """Into the children of the copy so far: both sources say how likely its next token is, and the rest is shared."""
    rank, width, likely = draft.copied_ranks[position], draft.width, draft.copied[position]
    if position < len(draft.token_ids):
        own = max(row[rank], LEAST) if rank < width else LEAST
        likely = _agree(likely, own)
    row[rank] = likely
    total = np.float32(0)
    for child in range(width):
        if child != rank:
            total += max(row[child], np.float32(0))
    if total > ONE - likely:
        for child in range(width):
            if child != rank and row[child] > 0:
                row[child] *= (ONE - likely) / total


@helper
def _agree(copied, own):  # type: ignore[no-untyped-def]
    """How likely a token is that follows a copy and that the drafter finds so likely by itself."""
    own = min(own, HIGHEST)
    value = AGREED[0] + AGREED[1] * np.log(copied / (ONE - copied)) + AGREED[2] * np.log(own / (ONE - own))
    return np.float32(ONE / (ONE + np.exp(-value)))


@helper
def _find_family(families, draft, position, parent):  # type: ignore[no-untyped-def]
    """Which row holds a parent's children. Parent K is the copy so far, whatever its rank is."""
    rows, places, ranks = families
    width = draft.width
    place = position * (width + 1) + parent
    if places[place]:
        return places[place]
    places[-1] += 1
    places[place] = places[-1]
    row = rows[places[place]]
    row[width] = ABSENT
    if position < len(draft.token_ids):
        rank = parent
        if parent == width and position > 0:
            rank = draft.copied_ranks[position - 1]
        _find_scores(row, draft, position, rank)
        if len(draft.weights):
            weight = draft.weights[min(position, len(draft.weights) - 1)]
            _calibrate(row, draft.log_probs[position], weight, ranks, rank if position > 0 else 0)
        else:
            for child in range(width):
                row[child] = np.exp(row[child])
    else:
        for child in range(width):
            row[child] = ABSENT
    if parent == width and position < len(draft.copied):
        _add_copy(row, draft, position)
    return places[place]


@helper
def _best(values, count):  # type: ignore[no-untyped-def]
    """Where the largest of the first `count` values stands, the first of equals."""
    found, largest = 0, values[0]
    for place in range(1, count):
        if values[place] > largest:
            found, largest = place, values[place]
    return found


@helper
def _next_best(row, rank):  # type: ignore[no-untyped-def]
    """What follows the value at `rank` if the row is sorted, equals in the order of their ranks; NONE: nothing."""
    limit = row[rank]
    for other in range(rank + 1, len(row)):
        if row[other] == limit:
            return other
    found, largest = NONE, -ONE
    for other in range(len(row)):
        if largest < row[other] < limit:
            found, largest = other, row[other]
    return found


@helper
def _find_ranks(ranks, token_ids, copied_ids, width):  # type: ignore[no-untyped-def]
    """Into `ranks`: where each token of the copy stands among its position's candidates."""
    for position in range(len(copied_ids)):
        ranks[position] = width
        if position < len(token_ids):
            for rank in range(width - 1, -1, -1):
                if token_ids[position, rank] == copied_ids[position]:
                    ranks[position] = rank


@helper
def _walk_head(families, draft, depth, head):  # type: ignore[no-untyped-def]
    """How likely the best chain is right up to each of its first positions, into `head`."""
    path, rank = np.float64(1), 0
    for position in range(min(len(head), depth, len(draft.token_ids))):
        row = families.rows[_find_family(families, draft, position, rank)]
        rank = _best(row, draft.width)
        path *= row[rank]
        head[position] = path


@helper
def _open(opened, families, taken, age, parent, rank):  # type: ignore[no-untyped-def]
    opened.parents[age], opened.ranks[age] = parent, rank
    opened.paths[age] = taken.paths[parent] * families.rows[taken.families[parent], rank]


@helper
def _take(draft, families, taken, opened, step_ms, rises, trust, depth, is_chain):  # type: ignore[no-untyped-def]
    """Fill `taken` while nodes pay; how many of them bring the most tokens per millisecond, and what they promise."""
    promised = best_promised = 0.0
    best_rate, best_count = 1 / step_ms[0], 0
    for count in range(1, len(rises) + 1):
        age = _best(opened.paths, 2 * count)
        path, parent, rank = opened.paths[age], opened.parents[age], opened.ranks[age]
        if path < 0 or trust * path <= best_rate * rises[count - 1]:
            break
        opened.paths[age] = -1
        position = taken.depths[parent]
        taken.paths[count], taken.parents[count], taken.depths[count] = path, parent, position + 1
        is_copied = taken.is_copied[parent] and position < len(draft.copied) and rank == draft.copied_ranks[position]
        taken.is_copied[count] = is_copied
        taken.token_ids[count] = draft.copied_ids[position] if is_copied else draft.token_ids[position, rank]
        promised += path
        rate = (1 + trust * promised) / step_ms[count]
        if rate > best_rate:
            best_rate, best_count, best_promised = rate, count, promised
        if count == len(rises):  # nothing comes behind it
            break
        family = families.rows[taken.families[parent]]
        sibling = NONE if is_chain else _next_best(family, rank)
        if sibling != NONE:
            _open(opened, families, taken, 2 * count, parent, sibling)
        if position + 1 < depth:
            key = draft.width if is_copied else rank
            taken.families[count] = _find_family(families, draft, position + 1, key)
            child = _best(families.rows[taken.families[count]], families.rows.shape[1])
            _open(opened, families, taken, 2 * count + 1, count, child)
    return best_count, best_promised


@compiled(
    "Tuple((int64, float64, UniTuple(float64, 3)))(int64[:,::1], float64[::1], int64[:,::1], float32[:,::1], "
    "float32[::1], float32[:,:,::1], float32[:,::1], int64[::1], float32[::1], float64[::1], float64[::1], float64, "
    "int64, int64, boolean)"
)
def grow(  # type: ignore[no-untyped-def]
    found, paths, token_ids, log_probs, first, pairwise, weights, copied_ids, copied, step_ms, rises, trust, width,
    depth, is_chain,
):  # fmt: skip
    """As many nodes, likeliest first, as maximise expected tokens / milliseconds: (how many, promised, head).

    `step_ms[n]` is a step that checks n nodes, and `rises` are its `smallest_rises`. All probabilities count `trust`
    times. `found` [3, nodes + 1] gets parents, token ids and depths behind those of the anchor, `paths` [nodes + 1] how
    likely each node and all above it are right. Nodes come out of the first `depth` positions and `width` candidates,
    and out of the copy.
    `promised` are the tokens that they bring if their probabilities are right, `head` how likely the best chain is
    right up to its first positions. On a chain no node has a sibling.

    One that is taken opens two others, its next sibling and its first child. Node n's are kept at 2n and 2n + 1: what
    stands first is older, and equal paths are taken in the order of their age. Costs may rise in stairs, so the best
    number may lie behind a dip. With n nodes taken and the best rate r so far, m more can win only if their
    probabilities exceed r * (step_ms[n + m] - step_ms[n]). None exceeds the next node's, so growth ends when that lies
    below r * the smallest rise per node.
    """
    size, copied_ranks = len(rises) + 1, np.empty(len(copied), np.int64)
    _find_ranks(copied_ranks, token_ids, copied_ids, width)
    draft = Draft(token_ids, log_probs, first, pairwise, weights, width, copied_ids, copied, copied_ranks)
    ranks = np.empty(width + 1, np.float32)
    for rank in range(width + 1):
        ranks[rank] = np.log1p(np.float32(rank))
    rows = np.empty((min(depth * (width + 1), size + HEAD + 1) + 1, width + 1), np.float32)
    families = Families(rows, np.zeros(depth * (width + 1) + 1, np.int64), ranks)
    opened = Opened(np.full(2 * size, -1.0), np.empty(2 * size, np.int64), np.empty(2 * size, np.int64))
    taken = Taken(paths, found[0], found[1], found[2], np.empty(size, np.int64), np.zeros(size, np.bool_))
    head = np.zeros(HEAD)
    taken.paths[0], taken.parents[0], taken.depths[0], taken.is_copied[0] = 1, NONE, 0, len(copied) > 0
    _walk_head(families, draft, depth, head)
    if depth:
        taken.families[0] = _find_family(families, draft, 0, width if len(copied) else 0)
        row = families.rows[taken.families[0]]
        _open(opened, families, taken, 0, 0, _best(row, len(row)))
    count, promised = _take(draft, families, taken, opened, step_ms, rises, trust, depth, is_chain)
    return count, promised, (head[0], head[1], head[2])  # a tuple is handed over faster than an array


@compiled("int64[::1](int64[:,::1], float32[:,::1], float32[::1], float32[:,:,::1], int64)")
def best_chain(token_ids, log_probs, first, pairwise, max_nodes):  # type: ignore[no-untyped-def]
    """Token ids of the single best path: at every position the likeliest child of the one before."""
    chain, rank = np.empty(min(len(token_ids), max_nodes), np.int64), 0
    for position in range(len(chain)):
        scores = log_probs[position]
        if len(first):
            scores = first if position == 0 else pairwise[position - 1, rank]
        rank = _best(scores, len(scores))
        chain[position] = token_ids[position, rank]
    return chain
