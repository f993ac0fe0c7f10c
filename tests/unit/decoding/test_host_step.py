"""What the host's step accepts of pilots."""

import pytest

from blockpilot import SamplingParams
from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.errors import RequestFailedError
from blockpilot.pilots.fixed import TreePilot
from tests.tiny import make_dflash, make_llm


def test_a_tree_holds_no_more_than_one_check_takes() -> None:
    llm = make_llm(drafter=make_dflash())
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    whole = llm.generate(["abc"], params, pilot=TreePilot(MAX_TREE_NODES), is_raw=True)[0]
    assert max(step.verify_size for step in whole.steps) == MAX_TREE_NODES + 1
    with pytest.raises(RequestFailedError, match=f"'tree:129' selected more than the {MAX_TREE_NODES} nodes"):
        llm.generate(["abc"], params, pilot=TreePilot(MAX_TREE_NODES + 1), is_raw=True)
    again = llm.generate(["abc"], params, pilot="ar", is_raw=True)[0]
    assert again.token_ids == whole.token_ids, "the engine goes on"
