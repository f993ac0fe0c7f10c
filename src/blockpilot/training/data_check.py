"""An early look at the data: hours of training on another model's text would end in a drafter nobody accepts."""

import torch

from blockpilot.core.errors import InputError
from blockpilot.models.decoder import Decoder
from blockpilot.training.dflash_objective import read_taps
from blockpilot.training.responses import ResponseSet

NUM_TEXTS = 32
LEAST_AGREEMENT = 0.4  # of answers that are mostly greedy, far below what the author of the text reaches


def check_data(decoder: Decoder, data: ResponseSet, *, device: torch.device, width: int) -> float:
    """Share of answer tokens that the target itself would say; an error where it is too low to be its own text."""
    count = min(NUM_TEXTS, len(data))
    ids, lengths, prompt_lengths = (x.to(device) for x in data.batch(torch.arange(count), width))
    hidden, _ = read_taps(decoder, ids, (0,))
    choices = decoder.logits(hidden).argmax(-1).view(ids.shape)
    places = torch.arange(ids.shape[1], device=device)
    is_answer = (places >= prompt_lengths[:, None]) & (places < lengths[:, None])
    share = float((choices[:, :-1] == ids[:, 1:])[is_answer[:, 1:]].float().mean())
    if not share >= LEAST_AGREEMENT:  # also where there is no answer at all, and the share is no number
        raise InputError(
            f"the target agrees with only {share:.0%} of the training answers: they were written by another model or "
            "under another chat template; run `blockpilot synthesize` with this target"
        )
    return share
