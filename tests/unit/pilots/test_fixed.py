"""Pilots that never change their mind."""

import numpy as np

from blockpilot.core.candidates import Candidates
from blockpilot.core.tree import DraftTree
from blockpilot.pilots.base import PilotInputs
from blockpilot.pilots.fixed import FixedPilot, PlainPilot, TreePilot

INPUTS = PilotInputs(
    num_steps=3,
    context_length=20,
    batch_size=1,
    num_remaining=100,
    max_block_size=64,
    trained_block_size=16,
    temperature=0.0,
    last_emitted=2,
)
CANDIDATES = Candidates(
    np.arange(30, dtype=np.int64).reshape(15, 2), np.log(np.tile(np.array([[0.6, 0.3]], dtype=np.float32), (15, 1)))
)


def test_plain_never_drafts() -> None:
    pilot = PlainPilot()
    assert pilot.choose(INPUTS) == 0
    assert pilot.select(INPUTS, CANDIDATES) == []


def test_fixed_checks_a_chain_of_its_size() -> None:
    pilot = FixedPilot(6)
    assert pilot.choose(INPUTS) == 6
    assert pilot.select(INPUTS, CANDIDATES) == [(d, 2 * d) for d in range(5)]
    assert pilot.select_tree(INPUTS, CANDIDATES, 7) == DraftTree.chain(7, [2 * d for d in range(5)])
    assert len(pilot.select_tree(INPUTS._replace(num_remaining=4), CANDIDATES, 7)) == 4


def test_tree_drafts_at_the_trained_size_and_checks_its_number_of_nodes() -> None:
    pilot = TreePilot(9)
    assert pilot.choose(INPUTS) == 16
    nodes = pilot.select(INPUTS, CANDIDATES)
    assert len(nodes) == 9
    assert [parent for parent, _ in nodes] != list(range(9)), "0.6, 0.3 twice over is worth a branch"
