"""The plugin in vLLM's model runner (V1): a pilot's word before the draft, another after it.

vLLM calls `propose_draft_token_ids` once per step, when the target's tokens of the step are known. Our wrapper lets the
pilots choose, hands vLLM the batch's largest choice as the number of tokens to draft, and returns each request's part
of the draft as a list. V1's scheduler accepts lists of different lengths, empty ones too.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockpilot.integrations.vllm.proposer import DraftScores, repair_key_norm
from blockpilot.integrations.vllm.settings import KEY, logger
from blockpilot.integrations.vllm.steering import Row, Steering
from blockpilot.pilots.base import PrefillState


class PilotedRunner:
    def __init__(self, runner: Any, steering: Steering) -> None:
        self.runner, self.steering = runner, steering
        self.scores = DraftScores(runner.drafter)
        self._propose: Callable[..., Any] = runner.propose_draft_token_ids
        self._is_ready = False
        self._is_broken = False
        runner.propose_draft_token_ids = self.propose

    def propose(self, scheduler_output: Any, sampled_token_ids: Any, *rest: Any) -> Any:
        """`rest`: sampling metadata, hidden states, those that logits come from, auxiliary ones, what was drafted."""
        _, _, sample_hidden_states, _, spec_decode_metadata, *_ = rest
        if self._is_broken:
            return self._propose(scheduler_output, sampled_token_ids, *rest)
        try:
            rows = self._rows(sampled_token_ids)
            count = self._choose(rows, scheduler_output, sample_hidden_states, spec_decode_metadata)
        except Exception:
            self._give_up()
            return self._propose(scheduler_output, sampled_token_ids, *rest)
        output = replace(scheduler_output, num_spec_tokens_to_schedule=count)
        drafted = self._propose(output, sampled_token_ids, *rest)
        try:
            return self._select(rows, drafted)
        except Exception:
            self._give_up()
            return drafted

    def _choose(self, rows: Sequence[Row], scheduler_output: Any, hidden: Tensor, metadata: Any) -> int:
        if not self._is_ready:  # weights are loaded, nothing has been drafted yet
            repair_key_norm(self.runner.drafter.model)
            self._is_ready = True
        count = self.steering.choose(
            rows,
            read_prefill=lambda index: self._read_prefill(rows[index], last_row(index, metadata), hidden),
            known_ids=self.runner.requests.keys(),
            limit=scheduler_output.num_spec_tokens_to_schedule,
        )
        self.scores.is_wanted = self.steering.wants_scores
        return count

    def _select(self, rows: Sequence[Row], drafted: Tensor) -> list[list[int]]:
        token_ids = drafted.cpu().numpy().astype(np.int64)
        log_probs = self.scores.take()
        return self.steering.select(
            rows, token_ids, None if log_probs is None else log_probs.view(token_ids.shape).cpu().numpy()
        )

    def _rows(self, sampled_token_ids: Any) -> list[Row]:
        """The batch's requests in the runner's order. Tokens of this step are in no request's answer yet, unless vLLM
        drafts after its book-keeping: then they come as lists."""
        is_late = isinstance(sampled_token_ids, list)
        counts = [len(ids) for ids in sampled_token_ids] if is_late else (sampled_token_ids >= 0).sum(dim=1).tolist()
        is_waiting = self.runner.discard_request_mask.np[: len(counts)].tolist()
        rows = []
        for request_id, count, waits in zip(self.runner.input_batch.req_ids, counts, is_waiting, strict=True):
            request, num_emitted = self.runner.requests[request_id], 0 if waits else int(count)
            params, room = request.sampling_params, self.runner.max_model_len - request.num_prompt_tokens
            row = Row(
                request_id=request_id,
                num_prompt_tokens=request.num_prompt_tokens,
                num_answer_tokens=len(request.output_token_ids) + (0 if is_late else num_emitted),
                num_emitted=num_emitted,
                max_answer_tokens=min(params.max_tokens or room, room),
                temperature=params.temperature,
                override=(params.extra_args or {}).get(KEY),
                is_waiting=waits,
            )
            rows.append(row)
        return rows

    def _read_prefill(self, row: Row, index: int, hidden: Tensor) -> PrefillState:
        last = hidden[index]
        with torch.inference_mode():
            logits = self.runner.model.compute_logits(last[None])[0].float()
        return PrefillState(
            num_prompt_tokens=row.num_prompt_tokens,
            probabilities=logits.softmax(dim=-1),
            hidden=last.float(),
            logits=logits,
        )

    def _give_up(self) -> None:
        self._is_broken, self.scores.is_wanted = True, False
        logger.exception("BlockPilot failed and stays off from here on; vLLM drafts as configured.")


def last_row(index: int, metadata: Any) -> int:
    """Index of the request's last sampled row; each request has one row more than drafted tokens."""
    if metadata is None:
        return index
    return sum(metadata.num_draft_tokens[: index + 1]) + index
