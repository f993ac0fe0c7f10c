"""Does a drafter belong to its target? One way of saying no for every kind of drafter.

A drafter made for another target still runs where the shapes happen to agree, and then accepts nothing: better one
clear line at load that names the field and both values.
"""

from collections.abc import Mapping, Sequence

from blockpilot.core.errors import InputError


def require_equal(name: str, pairs: Mapping[str, tuple[int | None, int]]) -> None:
    """`pairs` maps a field to its value in the drafter (None: its checkpoint does not say) and in the target."""
    for field, (ours, theirs) in pairs.items():
        if ours is not None and ours != theirs:
            raise InputError(
                f"drafter {name} does not fit its target: {field} is {ours} in the drafter and {theirs} in the target"
            )


def require_layers(name: str, field: str, layers: Sequence[int], num_layers: int) -> None:
    """`layers` are 0-based target layers whose outputs the drafter reads; `field` is what its config calls them."""
    beyond = [layer for layer in layers if not 0 <= layer < num_layers]
    if beyond:
        raise InputError(f"drafter {name} does not fit its target: {field} {beyond} of {num_layers} layers")
