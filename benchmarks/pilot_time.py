"""What pilots take of the host between two passes: microseconds per step, without a model.

    python benchmarks/pilot_time.py [--traces DIR ...] [--pilots step,chain-step,tree:63] [--plain] [--warm]

Every pilot walks through the same requests, step by step as `speculative_step` runs it, one request at a time. Requests
are read from folders of traces, or drawn from a seed: blocks of 15 positions and 16 candidates with pairwise scores
(`--plain`: without). One JSON row per pilot: medians over all steps of `choose`, `select` (the tree is built in it),
walking the tree (`accept`) and `learn`, `step_us` for the pilot's own three together, and the mean number of nodes.
Step costs are a line like an H200's with the default pair, unless told otherwise: they decide how many nodes are worth
a look.

In an engine other code runs between a pilot's calls and pushes it out of the processor's caches, which doubles its time
and more. So 8 MB are read before every call here; `--warm` leaves that out.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from blockpilot.core.draft import HostDraft
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.verification import accept
from blockpilot.pilots.base import Asked, Choice, Drafted, Outcome, Pilot, PilotInputs, Selection
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.registry import load_pilot
from blockpilot.replay.trace_files import TraceSet
from blockpilot.replay.traces import ABSENT, DraftColumns, PrefillColumns, Trace, TraceSetting

PILOTS = "step,chain-step,tree:63,tree:15,fixed:16"
SIZES, WIDTH, VOCABULARY = (4, 8, 16), 16, 1000
OTHER_DATA = np.ones(1_000_000)


@dataclass(frozen=True)
class StepTime:
    """Microseconds of one step."""

    choose: float
    select: float  # and build the tree
    accept: float
    learn: float
    num_nodes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pilots", default=PILOTS, help=f"comma-separated (default: {PILOTS})")
    parser.add_argument("--traces", type=Path, nargs="+", help="folders that `blockpilot collect` wrote")
    parser.add_argument("--num-requests", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of requests that are not traces")
    parser.add_argument("--plain", action="store_true", help="hide pairwise scores, as with plain DFlash")
    parser.add_argument("--warm", action="store_true", help="call pilots again and again, with nothing in between")
    parser.add_argument("--draft-ms", type=float, default=0.30)
    parser.add_argument("--verify-ms", type=float, default=0.75)
    parser.add_argument("--node-ms", type=float, default=0.004, help="what every node adds to a verify")
    arguments = parser.parse_args()
    traces = read_requests(arguments)
    costs = StepCosts.linear(arguments.draft_ms, arguments.verify_ms, arguments.node_ms)
    for spec in arguments.pilots.split(","):
        pilot = load_pilot(spec, target="smollm2-135m", drafter="smollm2-135m-dflash2", costs=lambda: costs)
        list(walk(traces[0], pilot))  # tables are made at first use
        steps = [step for trace in traces for step in walk(trace, pilot, is_warm=arguments.warm)]
        print(json.dumps({"pilot": spec, **summarize(steps)}), flush=True)


def read_requests(arguments: argparse.Namespace) -> list[Trace]:
    if arguments.traces:
        folders = [list(TraceSet(folder)) for folder in arguments.traces]
        share = -(-arguments.num_requests // len(folders))
        traces = [trace for folder in folders for trace in folder[:share]]
    else:
        traces = [draw_request(arguments.seed + index) for index in range(arguments.num_requests)]
    return [hide_pairs(trace) for trace in traces] if arguments.plain else traces


def summarize(steps: Sequence[StepTime]) -> dict[str, Any]:
    medians = {
        name: round(statistics.median(getattr(step, name) for step in steps), 1)
        for name in ("choose", "select", "accept", "learn")
    }
    return {
        **{f"{name}_us": value for name, value in medians.items()},
        "step_us": round(statistics.median(step.choose + step.select + step.learn for step in steps), 1),
        "nodes": round(statistics.fmean(step.num_nodes for step in steps), 1),
        "steps": len(steps),
    }


def walk(trace: Trace, pilot: Pilot, *, is_warm: bool = True) -> Iterator[StepTime]:
    """The steps of one request, as `replay/simulate.py` takes them."""
    memory = pilot.start(None)
    anchor = num_steps = 0
    while anchor < trace.num_anchors and trace.max_new_tokens - anchor > 2:
        inputs = make_inputs(trace, anchor, num_steps)
        started = pause(is_warm)
        choice = pilot.choose([Asked(memory, inputs)])[0]
        chosen = time.perf_counter()
        size = choice.draft_size
        draft = show_draft(trace, size, anchor, pilot.num_candidates) if size > 1 else None
        drafted = pause(is_warm)
        tree, promised, head = select(pilot, memory, inputs, choice, draft)
        selected = time.perf_counter()
        ranks = [*(trace.draft(size).true_ranks[anchor].tolist() if size > 1 else ()), ABSENT]
        target_ids = [ranks[min(depth, len(ranks) - 1)] for depth in tree.depths]
        verified = pause(is_warm)
        accepted = accept(tree, target_ids)
        ended = time.perf_counter()
        emitted = len(accepted.emitted_ids)
        landed = pause(is_warm)
        if draft is not None:
            pilot.learn([Outcome(memory, inputs, tree.max_depth, promised, head, emitted)])
        learnt = time.perf_counter()
        times = (chosen - started, selected - drafted, ended - verified, learnt - landed)
        yield StepTime(*(seconds * 1e6 for seconds in times), num_nodes=len(tree) - 1)
        anchor, num_steps = anchor + emitted, num_steps + 1


def select(pilot: Pilot, memory: Any, inputs: PilotInputs, choice: Choice, draft: HostDraft | None) -> Selection:
    if draft is None:
        return Selection(DraftTree.chain(ABSENT, []))
    return pilot.select([Drafted(memory, inputs, choice, draft, ABSENT)])[0]


def show_draft(trace: Trace, size: int, anchor: int, num_candidates: int) -> HostDraft:
    """With arrays that lie in memory as a drafter's do."""
    draft = trace.candidates(size, anchor, num_candidates)
    return replace(draft, token_ids=draft.token_ids.copy())


def pause(is_warm: bool) -> float:
    """What an engine does between two calls of a pilot, as far as caches are concerned; then the time."""
    if not is_warm:
        OTHER_DATA.sum()
    return time.perf_counter()


def make_inputs(trace: Trace, anchor: int, num_steps: int) -> PilotInputs:
    return PilotInputs(
        num_steps=num_steps,
        context_length=trace.num_prompt_tokens + anchor,
        batch_size=1,
        num_remaining=trace.max_new_tokens - anchor - 1,
        max_block_size=trace.setting.max_block_size,
        trained_block_size=trace.setting.trained_block_size,
        temperature=trace.temperature,
    )


def draw_request(seed: int, num_anchors: int = 256) -> Trace:
    """Drafts that get less sure with depth, and answers drawn from what they say."""
    random = np.random.default_rng(seed)
    deepest = max(SIZES) - 1
    sharpness = np.linspace(4.0, 1.0, deepest)[:, None]
    marginals = log_softmax(-np.sort(-random.normal(size=(num_anchors, deepest, WIDTH))) * sharpness)
    pairs = marginals[:, :, None, :] + random.normal(size=(num_anchors, deepest, WIDTH, WIDTH))
    pairwise = log_softmax(pairs)  # [anchor, position, parent, child]; the anchor is parent 0 of the first position
    ranks = np.zeros((num_anchors, deepest + 1), dtype=np.int64)
    for depth in range(deepest):
        rows = np.exp(pairwise[np.arange(num_anchors), depth, ranks[:, depth]]).cumsum(axis=-1)
        ranks[:, depth + 1] = (rows < random.random((num_anchors, 1))).sum(axis=-1).clip(max=WIDTH - 1)
    drafts = {
        size: DraftColumns(
            log_probs=marginals[:, : size - 1],
            entropy=np.zeros((num_anchors, size - 1)),
            true_ranks=ranks[:, 1:size].astype(np.uint8),
            first=pairwise[:, 0, 0],
            pairwise=pairwise[:, 1 : size - 1],
        )
        for size in SIZES
    }
    return Trace(
        prompt_id=f"seed {seed}",
        task="drawn",
        num_prompt_tokens=100,
        answer_ids=np.zeros(num_anchors + 1, np.int32),
        temperature=0.0,
        seed=seed,
        max_new_tokens=num_anchors + 1,
        finish_reason="length",
        num_disagreements=0,
        emitted=np.zeros((num_anchors, 0), np.uint8),
        prefill=PrefillColumns(
            token_ids=np.zeros(0, np.int32),
            probabilities=np.zeros(0, np.float32),
            mass=0,
            entropy=0,
            hidden=np.zeros(1),
        ),
        drafts=drafts,
        setting=TraceSetting((), max(SIZES), max(SIZES), VOCABULARY),
    )


def hide_pairs(trace: Trace) -> Trace:
    drafts = {size: replace(draft, first=None, pairwise=None) for size, draft in trace.drafts.items()}
    return replace(trace, drafts=drafts)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    found: np.ndarray = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    return found


if __name__ == "__main__":
    main()
