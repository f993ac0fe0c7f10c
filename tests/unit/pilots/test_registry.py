"""Pilots by name."""

import pytest

from blockpilot.core.config import MAX_BLOCK_SIZE, MAX_TREE_NODES
from blockpilot.core.errors import InputError
from blockpilot.pilots.fixed import FixedPilot, PlainPilot, TreePilot
from blockpilot.pilots.registry import load_pilot


@pytest.mark.parametrize(
    "spec", ["ar", "fixed:2", f"fixed:{MAX_BLOCK_SIZE}", "tree:1", "tree:3@4", f"tree:{MAX_TREE_NODES}"]
)
def test_a_pilot_is_called_what_it_was_asked_for(spec: str) -> None:
    assert load_pilot(spec).name == spec


def test_kinds() -> None:
    assert load_pilot("fixed:8") == FixedPilot(8)
    assert load_pilot("tree:31") == TreePilot(31)


def test_a_block_of_one_is_plain_decoding() -> None:
    assert load_pilot("fixed:1") == PlainPilot()


def test_auto_drafts_only_with_a_drafter() -> None:
    assert load_pilot("auto", has_drafter=False).num_candidates == 0
    assert load_pilot("auto", has_drafter=True).num_candidates > 0


@pytest.mark.parametrize("spec", ["tree:3@0", "tree:3@x", "tree:3@65", "tree:@4"])
def test_bad_draft_sizes_are_refused(spec: str) -> None:
    with pytest.raises(InputError, match="whole number"):
        load_pilot(spec)


@pytest.mark.parametrize("kind", ["fixed", "tree"])
@pytest.mark.parametrize("argument", ["", "0", "-1", "1.5", "x", "129", "99999999999999999999", "²", " 8"])
def test_bad_sizes_name_the_spec_and_the_limit(kind: str, argument: str) -> None:
    limit = {"fixed": MAX_BLOCK_SIZE, "tree": MAX_TREE_NODES}[kind]
    with pytest.raises(InputError, match=f"from 1 to {limit}") as caught:
        load_pilot(f"{kind}:{argument}")
    assert repr(f"{kind}:{argument}") in str(caught.value)


@pytest.mark.parametrize("spec", ["", "magic", "AR", "ar:3", "auto:1", "/no/such/pilot"])
def test_unknown_pilots_are_refused_and_the_known_ones_listed(spec: str) -> None:
    with pytest.raises(InputError, match="known: ar, fixed:B"):
        load_pilot(spec)
