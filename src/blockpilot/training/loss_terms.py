"""A loss before it is divided: sums and weights stay apart until every process's share is counted."""

from typing import NamedTuple

from torch import Tensor


class LossTerms(NamedTuple):
    """The loss is the sum over terms of `sums / weights`, each counted over all processes."""

    sums: Tensor  # [terms]
    weights: Tensor  # [terms], without gradient
    metrics: dict[str, Tensor]
