"""The pilots' arithmetic: growing trees, calibrating scores, forecasting drafts. Written once, in loops over arrays.

Where Numba is installed the loops are machine code: on a fast GPU a step takes a millisecond, and a third of that could
pass in Python between the draft and the check. Elsewhere Python runs the same functions, slowly. The probabilities of a
node's children are computed only when growth asks for them.

Arrays have one dtype each, lie in C order and may be written to. Where a drafter has no scores between parents and
children, `first` and `pairwise` are empty. Importing this package compiles, or reads from disk what was compiled
before: half a second to several. So pilots import it when they are made (`load_loops`), and not before.
"""

from blockpilot.pilots.loops.forecast import best_check, best_size, expected_tokens
from blockpilot.pilots.loops.growth import best_chain, grow

__all__ = ["best_chain", "best_check", "best_size", "expected_tokens", "grow"]
