"""Who runs next: prompt chunks under the token budget, oldest request first."""

from blockpilot.core.sampling_params import SamplingParams
from blockpilot.engine.scheduler import Scheduler
from blockpilot.engine.sequence import Sequence
from blockpilot.pilots.fixed import PlainPilot
from blockpilot.text.detokenizer import IncrementalDetokenizer
from tests.tiny import make_llm, make_tokenizer


def make_sequence(request_id: int, prompt_length: int) -> Sequence:
    return Sequence(
        request_id=request_id,
        prompt_ids=list(range(1, prompt_length + 1)),
        params=SamplingParams(),
        pilot=PlainPilot(),
        eos_token_ids=frozenset(),
        max_total=100,
        detokenizer=IncrementalDetokenizer(make_tokenizer().decode),
    )


def admit(scheduler: Scheduler, *lengths: int) -> list[Sequence]:
    sequences = [make_sequence(index, length) for index, length in enumerate(lengths)]
    for sequence in sequences:
        scheduler.add(sequence)
    for _ in sequences:
        scheduler.next_waiting()
    return sequences


def take_pass(scheduler: Scheduler) -> list[tuple[int, list[int]]]:
    """One prefill pass as the engine does it; returns (request id, chunk) pairs."""
    chunks = scheduler.prefill_chunks()
    for sequence, chunk in chunks:
        sequence.num_prefilled += len(chunk)
        if sequence.is_prefilled:
            scheduler.start_decoding(sequence)
    return [(sequence.request_id, chunk) for sequence, chunk in chunks]


def test_a_long_prompt_goes_in_chunks_of_the_budget() -> None:
    scheduler = Scheduler(token_budget=4)
    admit(scheduler, 10)
    passes = [take_pass(scheduler) for _ in range(3)]
    assert passes == [[(0, [1, 2, 3, 4])], [(0, [5, 6, 7, 8])], [(0, [9, 10])]]
    assert scheduler.prefill_chunks() == []


def test_short_prompts_share_a_pass_and_the_rest_waits_its_turn() -> None:
    scheduler = Scheduler(token_budget=8)
    admit(scheduler, 3, 4, 6, 2)
    assert take_pass(scheduler) == [(0, [1, 2, 3]), (1, [1, 2, 3, 4]), (2, [1])]
    assert take_pass(scheduler) == [(2, [2, 3, 4, 5, 6]), (3, [1, 2])]
    assert [sequence.request_id for sequence in scheduler.decoding] == [0, 1, 2, 3]


def test_no_pass_exceeds_the_budget_and_every_token_is_prefilled_once() -> None:
    scheduler = Scheduler(token_budget=7)
    sequences = admit(scheduler, 20, 1, 9, 7, 8)
    seen: dict[int, list[int]] = {sequence.request_id: [] for sequence in sequences}
    while scheduler.prefilling:
        chunks = take_pass(scheduler)
        assert 0 < sum(len(chunk) for _, chunk in chunks) <= 7
        for request_id, chunk in chunks:
            seen[request_id] += chunk
    assert seen == {sequence.request_id: sequence.prompt_ids for sequence in sequences}


def test_requests_are_found_and_removed_wherever_they_are() -> None:
    scheduler = Scheduler(token_budget=3)
    prefilling, decoding = admit(scheduler, 5, 3)
    waiting = make_sequence(7, 2)
    scheduler.add(waiting)
    decoding.num_prefilled = 3
    scheduler.start_decoding(decoding)
    for sequence in (waiting, prefilling, decoding):
        assert scheduler.find(sequence.request_id) is sequence
        scheduler.remove(sequence)
        assert scheduler.find(sequence.request_id) is None
    assert not scheduler.has_work


def test_chunked_prefill_gives_the_answer_of_one_pass() -> None:
    prompt, params = "a prompt of more than sixteen characters", SamplingParams(max_new_tokens=12, ignore_eos=True)
    whole = make_llm(token_budget=512).generate(prompt, params, is_raw=True)
    for budget in (1, 5, 16):
        assert make_llm(token_budget=budget).generate(prompt, params, is_raw=True).token_ids == whole.token_ids
