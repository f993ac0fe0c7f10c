"""What the BlockPilot paper's network takes: milliseconds of one decision, and memory.

    python benchmarks/pilot_network.py [--pilot DIR | --vocab-size N] [--device cuda] [--out FILE]

One JSON row per input kind. `decision_ms` is the median of `PrefillPilot.start`, from the target's logits on the device
to a block size on the host, one request at a time; `parameter_bytes` are those of the weights as they run (float32 on a
CPU, bfloat16 on a GPU), `peak_bytes` is what the device's allocator held more at most during decisions (null on a CPU).
A published network has random weights here unless `--pilot` names a trained one: its time does not depend on them. The
paper reports 7.34 ms and 0.62 GB for Qwen3's vocabulary on an H100.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from blockpilot.core.device import resolve_device
from blockpilot.core.errors import BlockPilotError
from blockpilot.core.files import write_text
from blockpilot.pilots.base import PrefillState
from blockpilot.pilots.files import load_pilot_folder
from blockpilot.pilots.prefill import PrefillConfig, PrefillNetwork, PrefillPilot, sizes_around

_QWEN3, _WARM_UP, _TIMED = 151_936, 5, 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pilot", type=Path, metavar="DIR", help="a trained pilot (default: random weights)")
    parser.add_argument("--vocab-size", type=int, default=_QWEN3, metavar="N", help="default: that of Qwen3")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where rows go besides standard output")
    arguments = parser.parse_args()
    try:
        rows = list(map(json.dumps, measure(arguments)))
    except BlockPilotError as error:
        sys.exit(f"pilot_network: {error}")
    print("\n".join(rows))
    if arguments.out is not None:
        write_text(arguments.out, "\n".join(rows) + "\n")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    device = resolve_device(arguments.device)
    if arguments.pilot is not None:
        pilot = load_pilot_folder(arguments.pilot)
        if not isinstance(pilot, PrefillPilot):
            raise BlockPilotError(f"{arguments.pilot} holds no prefill pilot")
        return [time_decisions(pilot, device)]
    torch.manual_seed(0)
    sizes = sizes_around(16)
    configs = [
        PrefillConfig(input_size=arguments.vocab_size, sizes=sizes, inputs=inputs)
        for inputs in ("probabilities", "logits")
    ]
    return [time_decisions(PrefillPilot(PrefillNetwork(config)), device) for config in configs]


def time_decisions(pilot: PrefillPilot, device: torch.device) -> dict[str, Any]:
    config, is_cuda = pilot.network.config, device.type == "cuda"
    hidden = torch.randn(config.input_size, device=device)
    logits = 4 * torch.randn(config.input_size, device=device)
    pilot.start(_state(logits, hidden))  # its weights move to the device
    held = torch.cuda.memory_allocated(device) if is_cuda else 0
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(_WARM_UP + _TIMED):
        if is_cuda:
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        pilot.start(_state(logits, hidden))  # it ends with a copy to the host
        seconds.append(time.perf_counter() - started)
    parameters = list(pilot.network.parameters())
    return {
        "inputs": config.inputs,
        "input_size": config.input_size,
        "hidden_size": config.hidden_size,
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "num_parameters": sum(one.numel() for one in parameters),
        "parameter_bytes": sum(one.numel() * one.element_size() for one in parameters),
        "peak_bytes": torch.cuda.max_memory_allocated(device) - held if is_cuda else None,
        "decision_ms": round(1e3 * statistics.median(seconds[_WARM_UP:]), 4),
    }


def _state(logits: torch.Tensor, hidden: torch.Tensor) -> PrefillState:
    """As an engine gives it after prefill."""
    probabilities = logits.softmax(dim=-1)
    return PrefillState(num_prompt_tokens=100, probabilities=probabilities, hidden=hidden, logits=logits)


if __name__ == "__main__":
    main()
