"""The timing of pilots: its requests are the same at every call, and its walks are those of replay."""

import numpy as np
from pilot_time import draw_request, hide_pairs, summarize, walk

from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.registry import load_pilot
from blockpilot.replay.simulate import simulate


def test_requests_depend_on_the_seed_alone():
    one, same, other = draw_request(1), draw_request(1), draw_request(2)
    np.testing.assert_array_equal(one.drafts[16].true_ranks, same.drafts[16].true_ranks)
    assert (one.drafts[16].true_ranks != other.drafts[16].true_ranks).any()
    assert hide_pairs(one).candidates(8, 0, 16).pairwise is None


def test_walks_take_the_steps_of_replay():
    trace = draw_request(0, num_anchors=60)
    for spec in ("step", "chain-step", "tree:15"):
        pilot = load_pilot(spec, costs=lambda: StepCosts.linear(0.3, 0.75, 0.01))
        steps = list(walk(trace, pilot, is_warm=False))
        simulated = [step for step in simulate(trace, pilot) if step.anchor + 2 < trace.max_new_tokens]
        checked = [step.verify_size - 1 for step in simulated]
        assert [step.num_nodes for step in steps][:-4] == checked[: len(steps) - 4]  # the last are cut at the end
        assert set(summarize(steps)) == {
            *(f"{n}_us" for n in ("choose", "select", "accept", "learn", "step")),
            "nodes",
            "steps",
        }
