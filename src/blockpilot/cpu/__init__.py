"""Models on a CPU in 8-bit integers: every pass over a target or a block drafter is one compiled call."""
