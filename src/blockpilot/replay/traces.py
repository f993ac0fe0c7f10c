"""A trace: for every position of one finished answer, what a step that starts there would emit.

Decoding is lossless, so the answer does not depend on what was drafted, and every answer token that has something after
it is an anchor: anchor k is answer token k. A trace holds, per anchor, how many tokens a chain of each block size emits
and, for some draft sizes, what the drafter offered and which of its candidates the answer confirms. Any pilot can be
run on that without a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockpilot.core.draft import HostDraft
from blockpilot.core.errors import InputError
from blockpilot.pilots.base import PrefillState
from blockpilot.pilots.fitting import ABSENT as ABSENT  # of `true_ranks`
from blockpilot.pilots.fitting import Drafts, Floats

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class DraftColumns(Drafts):
    """What the drafter offered at one draft size at every anchor of an answer."""

    entropy: Floats  # [A, D], of the drafter's distribution at the request's temperature, before noise


@dataclass(frozen=True, kw_only=True)
class PrefillColumns:
    """What the target knew when it had read the prompt: the likeliest first tokens, and its last hidden state."""

    token_ids: NDArray[np.int32]  # [M], best first; by id in compact traces
    probabilities: NDArray[np.float32]  # [M], at temperature 1
    mass: float  # their sum; what is missing to 1 lies outside of them
    entropy: float  # of the whole distribution
    hidden: Floats  # [H]
    logits: Floats | None = None  # [V], all of the first token's, where they were asked for


@dataclass(frozen=True)
class TraceSetting:
    """What all traces of one folder share."""

    sizes: tuple[int, ...]
    trained_block_size: int
    max_block_size: int
    vocab_size: int
    is_every_anchor: bool = True  # False: `emitted` is 0 where a fixed chain of that size never stands


@dataclass(frozen=True, kw_only=True)
class Trace:
    prompt_id: str
    task: str
    num_prompt_tokens: int
    answer_ids: NDArray[np.int32]  # [A + 1]
    temperature: float
    seed: int
    max_new_tokens: int  # what the answer might have had: the limit asked for, or what the context left
    finish_reason: str
    num_disagreements: int  # answer tokens that one pass over the finished text would have chosen otherwise
    emitted: Bytes  # [A, S], per block size of the setting: accepted + 1, cut at the answer's end
    prefill: PrefillColumns
    drafts: Mapping[int, DraftColumns]  # draft size -> what was offered
    setting: TraceSetting

    @property
    def num_anchors(self) -> int:
        return len(self.answer_ids) - 1

    def column(self, size: int) -> int:
        """Where `emitted` keeps a block size."""
        if size not in self.setting.sizes:
            listed = ", ".join(map(str, self.setting.sizes))
            raise InputError(f"the trace holds no block size {size}; it holds {listed}")
        return self.setting.sizes.index(size)

    def draft(self, size: int) -> DraftColumns:
        if size not in self.drafts:
            held = ", ".join(map(str, self.drafts)) or "none"
            raise InputError(f"the trace holds no candidates of draft size {size}; it holds {held}")
        return self.drafts[size]

    def candidates(self, size: int, anchor: int, num_candidates: int) -> HostDraft:
        """What a pilot that asks for `num_candidates` sees at an anchor. Token ids are ranks: pilots only hand them on.

        Fewer than it asks for where the trace keeps fewer.
        """
        draft = self.draft(size)
        width = draft.log_probs.shape[-1]
        return draft.candidates(anchor, width if draft.is_paired and num_candidates == 1 else num_candidates)

    def prefill_state(self) -> PrefillState:
        """The target's state after the prompt, as a pilot's `start` gets it; probabilities not kept are 0."""
        import torch

        hidden = torch.from_numpy(self.prefill.hidden.astype(np.float32))
        if self.prefill.logits is not None:
            logits = torch.from_numpy(self.prefill.logits.astype(np.float32))
            return PrefillState(
                num_prompt_tokens=self.num_prompt_tokens,
                probabilities=logits.softmax(dim=-1),
                hidden=hidden,
                logits=logits,
            )
        kept = np.zeros(self.setting.vocab_size, np.float32)
        kept[self.prefill.token_ids] = self.prefill.probabilities
        probabilities = torch.from_numpy(kept)
        return PrefillState(num_prompt_tokens=self.num_prompt_tokens, probabilities=probabilities, hidden=hidden)
