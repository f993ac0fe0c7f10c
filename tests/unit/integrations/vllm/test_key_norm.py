import logging
from types import SimpleNamespace

import pytest
import torch

from blockpilot.integrations.vllm.key_norm import normalize_keys, repair_key_norm

WEIGHTS = torch.tensor([[1.0, 2.0, 0.5, 1.0], [3.0, 0.1, 1.0, 2.0]])


def make_model(*, is_faulty, dtype=torch.float32):
    weights = WEIGHTS.to(dtype)
    inner = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-6)
    read = weights[:1].expand(2, 4) if is_faulty else weights  # the fault: the first layer's row for all layers
    inner._normalize_context_k = lambda keys: normalize_keys(keys, read, 1e-6)
    return SimpleNamespace(model=inner)


def test_keys_are_normalised_with_the_weight_of_their_layer():
    keys = torch.randn(2, 3, 2, 4)
    for layer in range(2):
        wanted = torch.nn.functional.rms_norm(keys[layer], (4,), WEIGHTS[layer], 1e-6)
        torch.testing.assert_close(normalize_keys(keys, WEIGHTS, 1e-6)[layer], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_faulty_kernel_is_found_and_replaced(dtype, caplog):
    model = make_model(is_faulty=True, dtype=dtype)
    assert repair_key_norm(model)
    keys = torch.randn(2, 3, 1, 4).to(dtype)
    torch.testing.assert_close(model.model._normalize_context_k(keys), normalize_keys(keys, WEIGHTS.to(dtype), 1e-6))
    assert "repaired" in caplog.text
    assert not repair_key_norm(model)  # once is enough


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_kernel_stays(dtype, caplog):
    caplog.set_level(logging.INFO)
    model = make_model(is_faulty=False, dtype=dtype)
    kernel = model.model._normalize_context_k
    assert not repair_key_norm(model) and model.model._normalize_context_k is kernel and not caplog.records


def test_other_drafters_stay():
    assert not repair_key_norm(SimpleNamespace(model=SimpleNamespace()))
