"""What training tests share: a target that can chat, texts worth learning, small runs."""

from pathlib import Path
from typing import Any

from blockpilot.models.loading import LoadedTarget
from blockpilot.models.weights import save_decoder_folder
from blockpilot.text.tokenizer import Tokenizer
from blockpilot.training.distributed import Group
from blockpilot.training.drafter_run import DrafterRun
from blockpilot.training.objectives import DFlashTraining
from blockpilot.training.responses import Response, ResponseSet
from blockpilot.training.trainer import Trainer
from tests.tiny import EOS_ID, VOCAB_SIZE, make_decoder, make_dflash, make_tokenizer

WIDTH = 40
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ 'Q ' + message['content'] + '$' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A ' }}{% endif %}"
)


def chat_tokenizer(template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    plain = make_tokenizer()
    return Tokenizer(plain.backend, special_tokens=plain.special_tokens, chat_template=template, eos_token_ids=[EOS_ID])


def chat_target(template: str | None = CHAT_TEMPLATE) -> LoadedTarget:
    decoder = make_decoder().eval().requires_grad_(False)
    return LoadedTarget(decoder=decoder, tokenizer=chat_tokenizer(template), name="tiny", path=Path("tiny"))


def save_target(folder: Path) -> Path:
    save_decoder_folder(make_decoder(), folder)
    chat_tokenizer().save(folder)
    return folder


def counting_texts(count: int = 24) -> ResponseSet:
    """Learnable texts: every token is the one before plus a step that the prompt shows."""
    texts = [[(1 + start + place * (1 + start % 3)) % VOCAB_SIZE for place in range(WIDTH)] for start in range(count)]
    return ResponseSet.from_responses(Response(ids, 4) for ids in texts)


def cycling_texts() -> ResponseSet:
    """Easy texts: four tokens in turn, so that the anchor tells the whole block."""
    texts = [[(11, 23, 42, 7)[(start + place) % 4] for place in range(WIDTH)] for start in range(4)]
    return ResponseSet.from_responses(Response(ids, 4) for ids in texts)


def make_objective(*, is_second: bool = False, **options: Any) -> DFlashTraining:
    run = DrafterRun(**({"blocks": 6, "block_size": 8, "min_block_size": 8, "width": WIDTH} | options))
    return DFlashTraining(make_dflash(is_second=is_second), make_decoder().eval().requires_grad_(False), run)


def make_trainer(
    out: Path,
    objective: Any = None,
    data: ResponseSet | None = None,
    *,
    group: Group | None = None,
    log_every: int = 2,
    **options: Any,
) -> Trainer:
    settings = {"steps": 20, "batch_size": 4, "width": WIDTH, "checkpoint_every": 1000}
    trainer = Trainer(
        objective or make_objective(),
        counting_texts() if data is None else data,
        DrafterRun(**(settings | options)),
        out=out,
        group=group or Group(),
        identity={"target": "tiny"},
    )
    trainer.log_every = log_every
    return trainer


def ignore(*values: object) -> None:
    """A report that nobody reads."""
