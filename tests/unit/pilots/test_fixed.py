"""Pilots that never change their mind."""

import numpy as np

from blockpilot.core.draft import Draft, HostDraft
from blockpilot.core.tree import DraftTree
from blockpilot.pilots.base import PLAIN, Asked, Choice, Drafted, whole_chain
from blockpilot.pilots.fixed import FixedPilot, PlainPilot, TreePilot
from tests.unit.pilots.pieces import choose_one, make_inputs, select_one

INPUTS = make_inputs()
DRAFT: HostDraft = Draft(
    np.arange(30, dtype=np.int64).reshape(15, 2), np.log(np.tile(np.array([[0.6, 0.3]], dtype=np.float32), (15, 1)))
)


def test_plain_never_drafts() -> None:
    pilot = PlainPilot()
    assert choose_one(pilot, INPUTS) == PLAIN and not pilot.options(16)
    assert select_one(pilot, INPUTS, DRAFT).tree == DraftTree.chain(9, [])


def test_fixed_checks_a_chain_of_its_size() -> None:
    pilot = FixedPilot(6)
    choice = choose_one(pilot, INPUTS)
    assert choice == whole_chain(6) and choice.is_whole_chain and list(pilot.options(16)) == [choice]
    assert select_one(pilot, INPUTS, DRAFT, choice=choice).tree == DraftTree.chain(9, [2 * d for d in range(5)])
    late = INPUTS._replace(num_remaining=4)
    assert len(select_one(pilot, late, DRAFT, choice=choice).tree) == 4


def test_tree_drafts_at_the_trained_size_and_checks_its_number_of_nodes() -> None:
    pilot = TreePilot(9)
    assert choose_one(pilot, INPUTS) == Choice(16, 9) and list(pilot.options(12)) == [Choice(12, 9)]
    assert choose_one(TreePilot(9, 5), INPUTS) == Choice(5, 9)
    tree = select_one(pilot, INPUTS, DRAFT).tree
    assert len(tree) == 10 and not tree.is_chain, "0.6, 0.3 twice over is worth a branch"
    assert select_one(pilot, INPUTS._replace(num_remaining=3), DRAFT).tree.max_depth == 2


def test_requests_of_a_batch_are_decided_for_in_their_order() -> None:
    inputs = [INPUTS._replace(num_remaining=left, trained_block_size=left) for left in (3, 9, 5)]
    for pilot in (FixedPilot(6), TreePilot(9)):
        choices = pilot.choose([Asked(None, one) for one in inputs])
        assert choices == [choose_one(pilot, one) for one in inputs]
        asked = list(zip([None] * 3, inputs, choices, [DRAFT] * 3, (9, 9, 9), strict=True))
        found = pilot.select([Drafted(*one) for one in asked])
        assert found == [
            select_one(pilot, one, DRAFT, choice=choice) for one, choice in zip(inputs, choices, strict=True)
        ]
        assert found[0].tree.max_depth == 2
