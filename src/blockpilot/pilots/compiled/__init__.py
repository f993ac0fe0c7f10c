"""The pilots' arithmetic as machine code: the loops of `growth.py`, `calibration.py` and `forecast.py` in Numba.

On a fast GPU a step takes a millisecond, and a third of that could pass in Python between the draft and the check. The
functions here decide the same on arrays, and compute the probabilities of a node's children only when growth asks for
them. They are compiled when this package is imported, which only `switch.py` does, and kept on disk where that can be.

Arrays have one dtype each, lie in C order and may be written to (`Candidates.is_plain`). Where a drafter has no scores
between parents and children, `first` and `pairwise` are empty.
"""

from blockpilot.pilots.compiled.forecast import best_check, best_size
from blockpilot.pilots.compiled.growth import best_chain, grow, grow_stacked

__all__ = ["best_chain", "best_check", "best_size", "grow", "grow_stacked"]
