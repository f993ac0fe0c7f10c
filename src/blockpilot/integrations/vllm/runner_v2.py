"""The plugin in vLLM's second model runner (V2) under synchronous scheduling. Written by its source, never run.

V2 keeps drafts on the device, always drafts the configured block, and tells the scheduler only how many tokens there
are. So choosing and selecting both happen after the draft, and `take_draft_token_ids` reports shorter drafts. The
drafter's confidence goes into a buffer that lives as long as the runner, because the draft may be a CUDA graph.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockpilot.integrations.vllm.settings import KEY, logger
from blockpilot.integrations.vllm.steering import Row, Steering
from blockpilot.pilots.base import PrefillState


class PilotedRunnerV2:
    def __init__(self, runner: Any, steering: Steering) -> None:
        self.runner, self.steering, self.speculator = runner, steering, runner.speculator
        size = runner.max_num_reqs * steering.num_draft_tokens
        self.log_probs = torch.zeros(size, dtype=torch.float32, device=runner.device)
        self.params: dict[str, Any] = {}
        self.answers: dict[str, int] = {}  # tokens of each answer
        self.kept: dict[str, int] = {}
        self._is_broken = False
        self._add: Callable[..., Any] = runner.add_requests
        self._take: Callable[[], Any] = runner.take_draft_token_ids
        self._propose: Callable[..., Tensor] = runner.speculator.propose
        self._compute: Callable[..., Tensor] = runner.speculator.compute_draft_logits
        runner.add_requests, runner.take_draft_token_ids = self.add_requests, self.take_draft_token_ids
        runner.speculator.propose = self.propose
        runner.speculator.compute_draft_logits = self.compute_draft_logits

    def add_requests(self, scheduler_output: Any) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            self.params[request.req_id] = request.sampling_params
        return self._add(scheduler_output)

    def compute_draft_logits(self, hidden: Tensor, *rest: Any) -> Tensor:
        logits = self._compute(hidden, *rest)
        self.log_probs[: len(logits)] = logits.amax(dim=-1).float() - logits.float().logsumexp(dim=-1)
        return logits

    def propose(self, batch: Any, metadata: Any, slots: Any, hidden: Tensor, aux: Any, num_sampled: Tensor, *rest: Any,
                **options: Any) -> Tensor:  # fmt: skip
        drafted = self._propose(batch, metadata, slots, hidden, aux, num_sampled, *rest, **options)
        if not options.get("dummy_run") and not self._is_broken:
            try:
                self._steer(batch, hidden, num_sampled, drafted, options.get("num_speculative_tokens"))
            except Exception:
                self._is_broken = True
                self.kept.clear()
                logger.exception("BlockPilot failed and stays off from here on; vLLM drafts as configured.")
        return drafted

    def take_draft_token_ids(self) -> Any:
        drafts = self._take()
        if drafts is not None:
            for request_id, token_ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
                del token_ids[self.kept.get(request_id, len(token_ids)) :]
        return drafts

    def _steer(self, batch: Any, hidden: Tensor, num_sampled: Tensor, drafted: Tensor, limit: int | None) -> None:
        known = self.runner.req_states.req_id_to_index
        for table in (self.params, self.answers, self.kept):
            for gone in table.keys() - known.keys():
                del table[gone]
        counts = num_sampled[: batch.num_reqs].tolist()
        rows = [self._row(request_id, count) for request_id, count in zip(batch.req_ids, counts, strict=True)]

        def read_prefill(index: int) -> PrefillState:
            last = hidden[batch.logits_indices[batch.cu_num_logits_np[index + 1] - 1]]
            probabilities = self.runner.model.compute_logits(last[None])[0].float().softmax(dim=-1)
            return PrefillState(
                num_prompt_tokens=rows[index].num_prompt_tokens, probabilities=probabilities, hidden=last.float()
            )

        self.steering.choose(rows, read_prefill=read_prefill, known_ids=known.keys(), limit=limit)
        shape = (len(rows), self.steering.num_draft_tokens)
        scores = self.log_probs[: shape[0] * shape[1]].view(shape).cpu().numpy()
        token_ids = drafted[: len(rows)].cpu().numpy().astype(np.int64)
        for row, kept in zip(rows, self.steering.select(rows, token_ids, scores), strict=True):
            self.kept[row.request_id] = len(kept)

    def _row(self, request_id: str, num_emitted: int) -> Row:
        states = self.runner.req_states
        index, params = states.req_id_to_index[request_id], self.params[request_id]
        num_prompt = int(states.prompt_len.np[index])
        self.answers[request_id] = self.answers.get(request_id, 0) + num_emitted
        return Row(
            request_id=request_id,
            num_prompt_tokens=num_prompt,
            num_answer_tokens=self.answers[request_id],
            num_emitted=num_emitted,
            max_answer_tokens=min(int(states.max_seq_len[index]), self.runner.max_model_len) - num_prompt,
            temperature=params.temperature,
            override=(params.extra_args or {}).get(KEY),
            is_waiting=num_emitted == 0,
        )
