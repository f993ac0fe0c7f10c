"""The BlockPilot paper's predictor and its ablations, trained on one table and judged on another."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockpilot.pilots.prefill import (
    PrefillConfig,
    PrefillNetwork,
    PrefillTraining,
    read_features,
    read_values,
    sizes_around,
    train_prefill,
)
from blockpilot.replay.traces import Trace
from pilot_study.intervals import Bootstrap
from pilot_study.request_sizes import best_fixed
from pilot_study.trace_tables import SizeTable

RADIUS = 2
BATCH_SIZE = 64
PREDICT_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One network. The defaults are the published one."""

    group: str
    name: str
    sizes: tuple[int, ...]
    inputs: str = "probabilities"
    hidden_size: int = 2048
    num_layers: int = 2
    objective: str = "class"
    preferred_size: int | None = None  # where sizes tie; None: the smallest
    seed: int = 0
    num_steps: int = 1500  # of training; how long the published one was trained is not known


def list_variants(
    collected: Sequence[int], trained: int, *, num_steps: int, shrink: int = 1, has_logits: bool = False
) -> list[Variant]:
    """The published network first. Where the traces lack a size of B-2 .. B+2 all collected sizes are candidates.

    `shrink` divides the widths. `has_logits`: the traces keep all logits of the first token.
    """
    windows = {radius: sizes_around(trained, radius) for radius in (1, 2, 3)}
    found = {radius: sizes for radius, sizes in windows.items() if set(sizes) <= set(collected)}
    sizes = found.get(RADIUS, tuple(collected))
    main = Variant(group="main", name="as published", sizes=sizes, hidden_size=2048 // shrink, num_steps=num_steps)
    variants = [main]
    variants += [replace(main, group="seed", name=f"seed {seed}", seed=seed) for seed in (1, 2)]
    variants += [
        replace(main, group="radius", name=f"k = {radius}", sizes=sizes)
        for radius, sizes in found.items()
        if radius != RADIUS and RADIUS in found
    ]
    variants += [
        replace(main, group="width", name=f"width {width}", hidden_size=width // shrink) for width in (512, 1024, 4096)
    ]
    variants += [replace(main, group="layers", name=f"layers {count}", num_layers=count) for count in (1, 3)]
    variants += [
        replace(main, group="inputs", name=f"inputs: {inputs}", inputs=inputs)
        for inputs in ("logits", "normalised", "softmax", "top-k", "hidden")
        if inputs != "logits" or has_logits
    ]
    variants.append(replace(main, group="ties", name=f"ties go to {trained}", preferred_size=trained))
    variants += [
        replace(main, group="training", name=f"{name} as many steps", num_steps=max(1, int(factor * num_steps)))
        for name, factor in (("a quarter", 0.25), ("4 times", 4))
    ]
    variants.append(replace(main, group="objective", name="objective: tau", objective="tau"))
    return variants


@dataclass(frozen=True)
class PrefillInputs:
    """What the target knew after each prompt, read for the device that trains."""

    traces: Sequence[Trace]
    device: str

    @property
    def has_logits(self) -> bool:
        return all(trace.prefill.logits is not None for trace in self.traces)

    def values(self, inputs: str) -> Tensor:
        """[N, V or H]"""
        return torch.stack([read_values(trace.prefill_state(), inputs) for trace in self.traces]).to(self.device)


def train_variant(variant: Variant, inputs: PrefillInputs, scores: NDArray[Any]) -> PrefillNetwork:
    """`scores` [N, sizes]: tau of the variant's sizes, or another figure whose largest value is best."""
    values = inputs.values(variant.inputs)
    config = PrefillConfig(
        input_size=values.shape[-1],
        sizes=variant.sizes,
        inputs=variant.inputs,
        hidden_size=variant.hidden_size,
        num_layers=variant.num_layers,
        objective=variant.objective,
    )
    num_epochs = math.ceil(variant.num_steps / math.ceil(len(values) / BATCH_SIZE))
    training = PrefillTraining(
        num_epochs=num_epochs, batch_size=BATCH_SIZE, seed=variant.seed, preferred_size=variant.preferred_size
    )
    return train_prefill(config, values, torch.from_numpy(scores), training)


@torch.inference_mode()
def predict(network: PrefillNetwork, inputs: PrefillInputs) -> NDArray[np.float64]:
    """The network's scores [N, sizes]."""
    values = inputs.values(network.config.inputs)
    parts = [network(read_features(rows, network.config.inputs)).cpu() for rows in values.split(PREDICT_ROWS)]
    return torch.cat(parts).double().numpy()


def judge_variant(
    variant: Variant, chosen: NDArray[np.int64], *, train: SizeTable, test: SizeTable, trained: int
) -> Iterator[dict[str, Any]]:
    """Rows over all test requests and, for the published network, per task."""
    fixed = best_fixed(train, variant.sizes)
    for task, places in test.by_task():
        if variant.group == "main" or len(places) == len(test):
            part = judge_choice(test.rows(places), chosen[places], variant.sizes, trained=trained, fixed=fixed)
            yield {"experiment": "prefill", "group": variant.group, "name": variant.name, "task": task} | part


def judge_choice(
    table: SizeTable, chosen: NDArray[np.int64], sizes: tuple[int, ...], *, trained: int, fixed: int
) -> dict[str, Any]:
    bootstrap = Bootstrap(table.tasks)
    among = table.columns(sizes)
    oracle, base = among.max(axis=1), table.columns([fixed])[:, 0]
    ours, reference = table.at(chosen), table.columns([trained])[:, 0]
    ours_free, base_free = table.at(chosen, "loop_free"), table.columns([fixed], "loop_free")[:, 0]
    return {
        "sizes": list(sizes),
        "num_requests": len(table),
        "best_fixed": fixed,
        "tau": bootstrap.mean(ours).to_dict(),
        "tau_trained": bootstrap.mean(reference).to_dict(),
        "tau_best_fixed": bootstrap.mean(base).to_dict(),
        "tau_oracle": bootstrap.mean(oracle).to_dict(),
        "gain_over_trained": bootstrap.gain(ours, reference).to_dict(),
        "gain_over_best_fixed": bootstrap.gain(ours, base).to_dict(),
        "loop_free_gain_over_best_fixed": bootstrap.gain(ours_free, base_free).to_dict(),
        "oracle_gain_over_best_fixed": bootstrap.gain(oracle, base).to_dict(),
        "captured": bootstrap.captured(ours, base, oracle).to_dict(),
        "accuracy": round(float((ours == oracle).mean()), 4),  # a tie counts as right
        "accuracy_of_best_fixed": round(float((base == oracle).mean()), 4),
        "chosen": _count(chosen),
    }


def _count(chosen: NDArray[np.int64]) -> Mapping[str, int]:
    sizes, counts = np.unique(chosen, return_counts=True)
    return dict(zip(map(str, sizes.tolist()), counts.tolist(), strict=True))
