"""The BlockPilot paper's pilot: one size per request, right after prefill."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockpilot import SamplingParams
from blockpilot.core.errors import InputError
from blockpilot.pilots.base import Asked, PrefillState, whole_chain
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.files import load_pilot_folder, save_pilot
from blockpilot.pilots.growth import grow_chain
from blockpilot.pilots.prefill import (
    INPUTS,
    PrefillConfig,
    PrefillNetwork,
    PrefillPilot,
    PrefillTraining,
    find_best,
    read_features,
    read_values,
    sizes_around,
    train_prefill,
)
from tests.tiny import VOCAB_SIZE, make_dflash, make_llm
from tests.unit.pilots.pieces import make_inputs, random_draft, select_one

CONFIG = PrefillConfig(input_size=VOCAB_SIZE, sizes=sizes_around(8), hidden_size=16)
PAIR = {"target": "tiny", "drafter": "dflash", "training": {}}


def make_state(seed: int) -> PrefillState:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(VOCAB_SIZE, generator=generator) * 3
    hidden = torch.randn(32, generator=generator)
    return PrefillState(num_prompt_tokens=9, probabilities=logits.softmax(dim=-1), hidden=hidden, logits=logits)


def test_the_published_shape() -> None:
    network = PrefillNetwork(PrefillConfig(input_size=1000, sizes=sizes_around(16)))
    shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    assert sizes_around(16) == (14, 15, 16, 17, 18)
    assert shapes["layers.0.weight"] == (2048, 1000)
    assert shapes["layers.1.weight"] == (2048, 2048)
    assert shapes["head.weight"] == (5, 2048) and len(shapes) == 6


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("num_layers", [1, 3])
def test_every_input_starts_a_fixed_chain_and_survives_a_file(inputs: str, num_layers: int, tmp_path: Path) -> None:
    size = 32 if inputs == "hidden" else VOCAB_SIZE
    torch.manual_seed(0)
    pilot = PrefillPilot(PrefillNetwork(replace(CONFIG, inputs=inputs, input_size=size, num_layers=num_layers)))
    save_pilot(tmp_path / "pilot", pilot, **PAIR)
    again = load_pilot_folder(tmp_path / "pilot")
    started = [pilot.start(make_state(seed)) for seed in range(6)]
    assert set(started) <= set(CONFIG.sizes)
    assert started == [again.start(make_state(seed)) for seed in range(6)]
    choices = again.choose([Asked(size, make_inputs()) for size in started])
    assert choices == [whole_chain(size) for size in started] and set(choices) <= set(again.options(8))
    draft = random_draft(0, depth=started[0] - 1)
    assert select_one(again, make_inputs(), draft, started[0], choices[0]).tree == grow_chain(draft, 9, 99)
    assert again.reads_prefill and again.num_candidates == 1


def test_inputs_are_what_they_are_called() -> None:
    state = make_state(0)
    assert read_values(state, "logits") is state.logits and read_values(state, "hidden") is state.hidden
    values = read_values(state, "probabilities")[None]
    assert values[0].equal(state.probabilities) and read_features(values, "probabilities").equal(values)
    assert float(read_features(values, "normalised").std()) == pytest.approx(1)
    assert float(read_features(values, "softmax").max()) < 0.05
    top = read_features(values, "top-k")[0]
    assert top[:-1].tolist() == sorted(values[0].tolist(), reverse=True)
    assert float(top[-1]) == pytest.approx(float(torch.distributions.Categorical(values[0]).entropy()), rel=1e-4)


def test_the_released_initialisation() -> None:
    torch.manual_seed(0)
    network = PrefillNetwork(PrefillConfig(input_size=600, sizes=sizes_around(16), hidden_size=400))
    first, head = network.layers[0], network.head
    assert network.dropout.p == 0.2
    assert float(first.weight.detach().abs().max()) == pytest.approx((6 / 600) ** 0.5, rel=1e-3)  # Kaiming, for ReLU
    assert float(head.weight.detach().abs().max()) == pytest.approx((6 / 405) ** 0.5, rel=1e-2)  # Xavier
    assert not any(parameter.any() for name, parameter in network.named_parameters() if name.endswith("bias"))


def test_ties_go_to_the_smallest_size_or_to_the_one_nearest_to_the_trained() -> None:
    sizes = sizes_around(16)
    tau = torch.tensor([[5, 5, 5, 5, 5], [6, 5, 5, 6, 6], [6, 6, 5, 5, 5], [5, 6, 5, 6, 5], [1, 2, 3, 4, 5.0]])
    assert [sizes[place] for place in find_best(tau, sizes)] == [14, 14, 14, 15, 18]
    assert [sizes[place] for place in find_best(tau, sizes, 16)] == [16, 17, 15, 15, 18]


def test_logits_that_are_not_all_there_are_refused() -> None:
    state = replace(make_state(0), logits=None)
    with pytest.raises(InputError, match="likeliest first tokens alone: collect with --whole-logits"):
        read_values(state, "logits")


def test_training_learns_which_size_is_best() -> None:
    torch.manual_seed(0)
    values = torch.rand(400, 12)
    best = (values[:, 0] > values[:, 1]).long() * 2  # the first size or the last
    tau = 3 + torch.nn.functional.one_hot(best, 3).float()
    config = PrefillConfig(input_size=12, sizes=(4, 8, 16), hidden_size=32)
    network = train_prefill(config, values[:300], tau[:300], PrefillTraining(num_epochs=60, learning_rate=3e-3))
    assert float((network(values[300:]).argmax(dim=-1) == best[300:]).float().mean()) > 0.9


def test_predicted_tau_is_weighed_against_costs() -> None:
    config = PrefillConfig(input_size=12, sizes=(4, 16), hidden_size=16, objective="tau")
    values, tau = torch.rand(64, 12), torch.tensor([[3.0, 4.0]]).repeat(64, 1)
    network = train_prefill(config, values, tau, PrefillTraining(num_epochs=80, learning_rate=1e-2))
    state = replace(make_state(0), probabilities=values[0])
    sizes = [
        PrefillPilot(network, costs).start(state) for costs in (StepCosts.linear(slope=0), StepCosts.linear(slope=0.3))
    ]
    assert sizes == [16, 4]


def test_online_the_text_is_the_plain_text(tmp_path: Path) -> None:
    torch.manual_seed(1)
    save_pilot(tmp_path, PrefillPilot(PrefillNetwork(CONFIG)), **PAIR)
    llm = make_llm(drafter=make_dflash())
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    prompts = ["the quick brown fox", "Z", "abcabc"]
    drafted = llm.generate(prompts, params, pilot=f"prefill:{tmp_path}", is_raw=True)
    plain = llm.generate(prompts, params, pilot="ar", is_raw=True)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert {step.block_size for c in drafted for step in c.steps} <= {1, *CONFIG.sizes}


def test_a_pilot_of_another_target_names_both_sides() -> None:
    pilot = PrefillPilot(PrefillNetwork(replace(CONFIG, input_size=50)))
    with pytest.raises(InputError, match=rf"50 inputs .* gives {VOCAB_SIZE}"):
        pilot.start(make_state(0))
    with pytest.raises(InputError, match="gave none"):
        pilot.start(None)


@pytest.mark.parametrize("change", [{"inputs": "magic"}, {"objective": "x"}, {"num_layers": 4}, {"sizes": ()}])
def test_bad_choices_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(InputError, match="prefill pilot"):
        replace(CONFIG, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("inputs", ["probabilities", "normalised"])
def test_columns_that_no_request_touches_are_trained_as_if_they_were_there(inputs: str) -> None:
    draw = torch.Generator().manual_seed(5)
    values = torch.rand(40, 30, generator=draw) * (torch.arange(30) % 3 == 0)  # two thirds of the inputs are always 0
    tau = torch.rand(40, 3, generator=draw)
    config = PrefillConfig(input_size=30, sizes=(4, 8, 16), inputs=inputs, hidden_size=16)
    reports: list[tuple[int, int]] = []
    network = train_prefill(
        config, values, tau, PrefillTraining(num_epochs=3, batch_size=16), lambda *x: reports.append(x)
    )
    torch.manual_seed(0)
    dense = PrefillNetwork(config).train()
    optimizer, order = torch.optim.AdamW(dense.parameters(), lr=3e-4), torch.Generator().manual_seed(0)
    for _ in range(3):
        for rows in torch.randperm(40, generator=order).split(16):
            scores = dense(read_features(values[rows], inputs))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(scores, tau[rows].argmax(dim=-1)).backward()
            optimizer.step()
    assert reports == [(1, 3), (2, 3), (3, 3)] and network.layers[0].weight.shape == (16, 30)
    for name, weight in dense.state_dict().items():
        torch.testing.assert_close(network.state_dict()[name], weight, rtol=1e-5, atol=1e-6)
