"""The BlockPilot paper's pilot: one block size per request, read off the target's first next-token distribution.

A multilayer perceptron sees the distribution after prefill once and names a size near the trained one; the whole answer
is then drafted at that size. As in the paper and its released code: two hidden layers of 2048 with ReLU and dropout of
0.2, the second with a residual, Kaiming's and Xavier's initialisation, cross-entropy over the sizes B-2 .. B+2. The
paper names probabilities as inputs, the released code writes raw logits; how it was trained is not released. The
variants of its ablations are options here.

    inputs      probabilities, logits, normalised, softmax (a second time), top-k (largest ones and the entropy), hidden
    objective   class: the likeliest best size; tau: predicted tau of every size, divided by what its step costs
    ties        where several sizes bring as much the smallest counts as the best, as in the released tables, or the one
                nearest to the drafter's own (`preferred_size`)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from blockpilot.core.errors import InputError
from blockpilot.core.reading import Positive, convert
from blockpilot.pilots.base import Asked, Choice, Drafted, Pilot, PrefillState, Selection, whole_chain
from blockpilot.pilots.cost_model import CostSource, StepCosts
from blockpilot.pilots.fixed import select_chains

INPUTS = ("probabilities", "logits", "normalised", "softmax", "top-k", "hidden")
_OBJECTIVES = ("class", "tau")
_MAX_INPUTS = 1 << 20
_TOP_K = 64
_TRAINING_STEPS = 1500  # how long the published pilot was trained is not known
_WEIGHT_DECAY = 0.01


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    input_size: Positive  # the vocabulary's size; for `hidden` the target's hidden size
    sizes: tuple[Positive, ...]  # block sizes to choose from
    inputs: str = "probabilities"
    hidden_size: int = 2048
    num_layers: int = 2
    dropout: float = 0.2
    objective: str = "class"

    def __post_init__(self) -> None:
        if self.inputs not in INPUTS or self.objective not in _OBJECTIVES:
            known = f"inputs are {', '.join(INPUTS)}, objectives {', '.join(_OBJECTIVES)}"
            raise InputError(
                f"prefill pilot: no such choice as {self.inputs!r:.40} with {self.objective!r:.40}; {known}"
            )
        if not 1 <= self.num_layers <= 3 or not 1 <= self.hidden_size <= 4096 or not 0 <= self.dropout < 1:
            raise InputError("prefill pilot: 1 to 3 layers of up to 4096, and a dropout below 1")
        if self.input_size > _MAX_INPUTS:
            raise InputError(f"prefill pilot: {self.input_size} inputs; at most {_MAX_INPUTS:,} are supported")
        if not self.sizes or min(self.sizes) < 1:
            raise InputError(f"prefill pilot: sizes {self.sizes} are no block sizes")


def read_config(values: Mapping[str, Any], where: str) -> PrefillConfig:
    """The configuration that a pilot's card names."""
    if unknown := values.keys() - PrefillConfig.__dataclass_fields__.keys():
        raise InputError(f"{where}: unknown field {min(unknown)!r:.40}")
    config: PrefillConfig = convert(dict(values), PrefillConfig, where)
    return config


def sizes_around(trained_size: int, reach: int = 2) -> tuple[int, ...]:
    """The paper's candidates: B-k .. B+k."""
    return tuple(range(max(2, trained_size - reach), trained_size + reach + 1))


def read_values(state: PrefillState, inputs: str) -> Tensor:
    """What a network of these inputs reads of a request [V or H], in training as online."""
    if inputs != "logits":
        return state.hidden if inputs == "hidden" else state.probabilities
    if state.logits is None:
        raise InputError("these traces keep the likeliest first tokens alone: collect with --whole-logits")
    return state.logits


def read_features(values: Tensor, inputs: str) -> Tensor:
    """Network inputs [..., F] out of what `read_values` gives."""
    values = values.float()
    if inputs == "normalised":
        return (values - values.mean(dim=-1, keepdim=True)) / values.std(dim=-1, keepdim=True).clamp_min(1e-12)
    if inputs == "softmax":
        return values.softmax(dim=-1)
    if inputs == "top-k":
        entropy = -(values * values.clamp_min(1e-20).log()).sum(dim=-1, keepdim=True)
        return torch.cat([values.topk(min(_TOP_K, values.shape[-1]), dim=-1).values, entropy], dim=-1)
    return values


class PrefillNetwork(nn.Module):
    def __init__(self, config: PrefillConfig) -> None:
        super().__init__()
        self.config = config
        num_features = min(_TOP_K, config.input_size) + 1 if config.inputs == "top-k" else config.input_size
        widths = [num_features] + [config.hidden_size] * config.num_layers
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.hidden_size, len(config.sizes))
        for layer in self.layers:
            nn.init.kaiming_uniform_(cast(nn.Linear, layer).weight, nonlinearity="relu")
        nn.init.xavier_uniform_(self.head.weight)
        for layer in (*self.layers, self.head):
            nn.init.zeros_(cast(nn.Linear, layer).bias)

    def forward(self, features: Tensor) -> Tensor:  # [N, F]
        """Logits of the sizes [N, sizes], or their tau."""
        hidden = self.dropout(self.layers[0](features).relu())
        for layer in self.layers[1:]:
            hidden = hidden + self.dropout(layer(hidden).relu())
        scores: Tensor = self.head(hidden)
        return scores if self.config.objective == "class" else 1 + nn.functional.softplus(scores)


class PrefillPilot(Pilot):
    name = "prefill"
    num_candidates = 1
    reads_prefill = True

    def __init__(self, network: PrefillNetwork, costs: CostSource | None = None, name: str = "prefill") -> None:
        self.name = name
        self.costs: CostSource = costs or StepCosts.linear()
        self.network = network.eval().requires_grad_(False)

    @torch.inference_mode()
    def start(self, prefill: PrefillState | None, neighbours: Sequence[int] = ()) -> int:
        """The block size of the whole answer: all that such a request remembers."""
        config = self.network.config
        if prefill is None:
            raise InputError("the prefill pilot needs the state after prefill, and this engine gave none")
        values = read_values(prefill, config.inputs)
        if values.shape[-1] != config.input_size:
            raise InputError(
                f"the pilot was trained for a target with {config.input_size} inputs ({config.inputs}), and this one "
                f"gives {values.shape[-1]}"
            )
        if self.network.head.weight.device != values.device:  # on a GPU its time is that of reading the weights
            self.network.to(values.device, torch.bfloat16 if values.is_cuda else torch.float32)
        features = read_features(values, config.inputs)[None].to(self.network.head.weight.dtype)
        scores, sizes = self.network(features)[0].tolist(), config.sizes
        if config.objective == "tau":
            costs = [self.costs.current.step_ms(size, size, context_length=prefill.num_prompt_tokens) for size in sizes]
            scores = [score / cost for score, cost in zip(scores, costs, strict=True)]
        return sizes[max(range(len(sizes)), key=scores.__getitem__)]

    def choose(self, requests: Sequence[Asked]) -> list[Choice]:
        return [whole_chain(size) for size, _ in requests]

    def select(self, requests: Sequence[Drafted]) -> list[Selection]:
        return select_chains(requests)

    def options(self, trained_block_size: int) -> Sequence[Choice]:
        return [whole_chain(size) for size in self.network.config.sizes]


@dataclass(frozen=True, kw_only=True)
class PrefillTraining:
    num_epochs: int | None = None  # None: as many as make `_TRAINING_STEPS` steps
    batch_size: int = 64
    learning_rate: float = 3e-4
    seed: int = 0
    preferred_size: int | None = None  # of sizes that bring as much the nearest to this one is best; None: the smallest


def find_best(tau: Tensor, sizes: Sequence[int], preferred_size: int | None = None) -> Tensor:
    """The place [N] of each request's best size in `tau` [N, sizes]."""
    preferred = min(sizes) if preferred_size is None else preferred_size
    nearest_first = sorted(range(len(sizes)), key=lambda place: abs(sizes[place] - preferred))
    order = torch.tensor(nearest_first, device=tau.device)
    return order[tau[:, order].argmax(dim=-1)]


def train_prefill(
    config: PrefillConfig,
    values: Tensor,
    tau: Tensor,
    training: PrefillTraining,
    report: Callable[[int, int], None] | None = None,
) -> PrefillNetwork:
    """`values` [N, V or H], as `read_values` gives them, and measured `tau` [N, sizes] of the same requests.

    The objective `class` learns which size is best; `tau` learns how much each size brings. `report` is called
    after every epoch with the epochs done, and of how many.

    Where traces keep the likeliest first tokens alone, these are a small part of a vocabulary. Inputs that are 0 in
    every row have no gradient, so AdamW moves their weights by its decay alone: training the first layer without them
    gives the same weights in a fraction of the time.
    """
    torch.manual_seed(training.seed)
    with values.device:  # a hundred million random numbers are drawn where they are needed
        network = PrefillNetwork(config).train()
    features, tau = read_features(values, config.inputs), tau.float().to(values.device)
    first = cast(nn.Linear, network.layers[0])
    whole, used = first.weight.detach(), features.any(dim=0).nonzero()[:, 0]
    first.weight, features = nn.Parameter(whole[:, used]), features[:, used]
    rate = training.learning_rate
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, weight_decay=_WEIGHT_DECAY, fused=True)
    best = find_best(tau, config.sizes, training.preferred_size)
    order = torch.Generator().manual_seed(training.seed)
    steps_per_epoch = -(-len(tau) // training.batch_size)
    num_epochs = training.num_epochs or -(-_TRAINING_STEPS // steps_per_epoch)
    for epoch in range(num_epochs):
        for rows in torch.randperm(len(tau), generator=order).to(values.device).split(training.batch_size):
            optimizer.zero_grad()
            scores = network(features[rows])
            if config.objective == "class":
                loss = nn.functional.cross_entropy(scores, best[rows])
            else:
                loss = nn.functional.mse_loss(scores, tau[rows])
            loss.backward()
            optimizer.step()
        if report is not None:
            report(epoch + 1, num_epochs)
    whole.mul_((1 - rate * _WEIGHT_DECAY) ** (num_epochs * steps_per_epoch))
    whole[:, used] = first.weight.detach()
    first.weight = nn.Parameter(whole)
    return network.eval()
