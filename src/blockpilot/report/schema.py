"""What the files of a run must hold for a report to be made of them.

A run folder may come from elsewhere, so each value is of its kind and within bounds that no honest run passes. Further
keys are allowed: runs of other versions have some. What may be absent here is absent in older runs, or in single rows.
"""

from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

from blockpilot.core.reading import Count

_MAX_NAME = 200  # characters
_MAX_POSITIONS = 1024
_MAX_STEPS = 1 << 20
_MAX_POINTS = 1024

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_NAME)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
Number = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Interval = tuple[Number, Number]


class Ratio(TypedDict):
    ratio: Number
    ci: Interval | None


class NamedRatio(Ratio):
    method: Name


class Fastest(TypedDict):
    method: Name
    speedup: Number


class Positions(TypedDict):
    drafted: Annotated[list[Count], msgspec.Meta(max_length=_MAX_POSITIONS)]
    accepted: Annotated[list[Count], msgspec.Meta(max_length=_MAX_POSITIONS)]


class StepParts(TypedDict):
    draft: Number
    verify: Number
    pilot: Number
    other: Number


class PromptValues(TypedDict):
    id: str
    tau: Number | None
    tokens_per_second: Number | None


class RowValues(TypedDict):
    """A line of rows.jsonl. A value is None where it could not be told, as tau of answers without a step."""

    task: Name
    method: Name
    model: Name
    temperature: Number
    num_prompts: Count
    num_tokens: Count
    num_steps: Count
    tau_mean: Number | None
    tau_pooled: Number | None
    tau_loop_free: Number | None
    loop_share: Number | None
    tokens_per_second: Number | None
    speedup: Number | None
    speedup_ci: Interval | None
    end_to_end_speedup: Number | None
    mismatches: Count
    near_ties: Count
    manifest: Name
    over_best_fixed: NotRequired[Ratio | None]
    over_best_fixed_tree: NotRequired[Ratio | None]
    over_best_chain: NotRequired[NamedRatio | None]
    positions: NotRequired[Positions | None]
    milliseconds_per_step: NotRequired[StepParts | None]
    time_to_first_token: NotRequired[Number | None]
    score: NotRequired[Number | None]
    num_scored: NotRequired[Count]
    best_fixed_of_task: NotRequired[Fastest | None]
    per_prompt: NotRequired[list[PromptValues]]


class SampleSteps(TypedDict):
    block_sizes: Annotated[list[Size], msgspec.Meta(max_length=_MAX_STEPS)]
    verify_sizes: Annotated[list[Size], msgspec.Meta(max_length=_MAX_STEPS)]
    emitted: Annotated[list[Size], msgspec.Meta(max_length=_MAX_STEPS)]


class SampleValues(TypedDict):
    """A line of samples.jsonl."""

    task: Name
    prompt_id: str
    prompt: str
    pieces: Annotated[list[str], msgspec.Meta(max_length=_MAX_STEPS)]
    steps: dict[Name, SampleSteps]


class DifferenceValues(TypedDict):
    """A line of differences.jsonl."""

    task: Name
    prompt_id: str
    position: Count
    gap: Number | None
    is_near_tie: bool
    answers: dict[Name, list[Any]]


class Point(TypedDict):
    tokens: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    ms: Number
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    context_length: Annotated[int, msgspec.Meta(ge=0, le=2**30)]


class Costs(TypedDict):
    draft: Annotated[list[Point], msgspec.Meta(max_length=_MAX_POINTS)]
    verify: Annotated[list[Point], msgspec.Meta(min_length=1, max_length=_MAX_POINTS)]


class Session(TypedDict):
    step_costs: NotRequired[Costs]


class BestFixed(TypedDict):
    size: Size
    size_by_task: dict[str, Size]


class BestFixedTree(TypedDict):
    method: Name
    method_by_task: dict[str, Name]


class Drafter(TypedDict):
    name: Name


class Reference(TypedDict):
    folder: Name


class Source(TypedDict):
    file: NotRequired[str | None]


class Arguments(TypedDict):
    split: NotRequired[Name]
    max_new_tokens: NotRequired[Count]
    repeats: NotRequired[Count]
    concurrency: NotRequired[Count]
    token_budget: NotRequired[Count | None]


class ManifestValues(TypedDict):
    """What a report says of manifest.json; it shows all of it."""

    device: NotRequired[Name]
    dtype: NotRequired[Name]
    num_threads: NotRequired[Count]
    near_tie_gap: NotRequired[Number | None]
    arguments: NotRequired[Arguments]
    drafters: NotRequired[dict[str, Drafter]]
    prompts: NotRequired[dict[str, Source]]
    reference: NotRequired[Reference | None]
    sessions: NotRequired[list[Session]]
    best_fixed: NotRequired[BestFixed | None]
    best_fixed_tree: NotRequired[BestFixedTree | None]
    left_out_tasks: NotRequired[dict[str, str]]
    prompts_too_long: NotRequired[dict[str, Count]]
