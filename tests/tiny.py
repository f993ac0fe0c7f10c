"""Tiny random models, a one-character-per-token tokenizer, and drafters that know or miss the answer."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from blockpilot.cache.slots import SlotCache
from blockpilot.core.config import MAX_BLOCK_SIZE, EngineConfig
from blockpilot.core.device import Placement
from blockpilot.core.draft import Draft, HostDraft
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.drafter import DraftRequest, Observation
from blockpilot.engine.llm import LLM
from blockpilot.models.config import DecoderConfig, MoeConfig, RopeConfig
from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash import DFlash, DFlashConfig
from blockpilot.models.eagle3 import Eagle3, Eagle3Config
from blockpilot.models.loading import LoadedTarget
from blockpilot.pilots.base import Asked, Choice, Drafted, Pilot, Selection
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.text.tokenizer import Tokenizer
from tests.coded import give_codes
from tests.support import byte_vocabulary_fields

VOCAB_SIZE = 61
EOS_ID = 0
CONTEXT_LENGTH = 160
ALPHABET = "$ abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456"
ARCHITECTURES = ("llama", "llama3-rope", "llama-untied", "qwen2", "qwen3", "qwen3_moe")

_BASE = DecoderConfig(
    architecture="llama",
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    context_length=CONTEXT_LENGTH,
    rope=RopeConfig(theta=10000.0),
    is_tied=True,
    eos_token_ids=(EOS_ID,),
)
_LLAMA3 = RopeConfig(theta=10000.0, kind="llama3", factor=4.0, original_context_length=64)
_MOE = MoeConfig(num_experts=4, num_active=2, intermediate_size=24, is_normalized=True, dense_layers=(1,))
CONFIGS = {
    "llama": _BASE,
    "llama3-rope": replace(_BASE, rope=_LLAMA3),
    "llama-untied": replace(_BASE, is_tied=False),
    "qwen2": replace(_BASE, architecture="qwen2", rope=RopeConfig(theta=1e6)),
    "qwen3": replace(_BASE, architecture="qwen3", is_tied=False),
    "qwen3_moe": replace(_BASE, architecture="qwen3_moe", moe=_MOE),
}
_WIDE = replace(_BASE, hidden_size=64, intermediate_size=96, head_dim=16)
_WIDE_MOE = replace(_MOE, intermediate_size=32, is_normalized=False)
CONFIGS |= {  # shapes that run in 8-bit integers
    "llama-int8": _WIDE,
    "llama-untied-int8": replace(_WIDE, rope=_LLAMA3, is_tied=False, num_kv_heads=1),
    "qwen2-int8": replace(_WIDE, architecture="qwen2", is_tied=False, rope=RopeConfig(theta=1e6)),
    "qwen2-fine-int8": replace(
        _WIDE, architecture="qwen2", hidden_size=256, intermediate_size=256, num_layers=3, head_dim=64
    ),
    "qwen3-int8": replace(_WIDE, architecture="qwen3", num_kv_heads=4),
    "qwen3_moe-int8": replace(_WIDE, architecture="qwen3_moe", moe=_WIDE_MOE),
}
CODED = tuple(name for name in CONFIGS if name.endswith("-int8"))
CONFIGS |= {  # with a vocabulary of bytes
    "bytes": replace(_BASE, vocab_size=288, context_length=1024),
    "bytes-int8": replace(_WIDE, vocab_size=288, context_length=1024),
}


def make_decoder(name: str = "llama", seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    decoder = Decoder(CONFIGS[name])
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.35 if parameter.dim() > 1 else 1.0)
    if name.endswith("-int8"):
        give_codes(decoder)
    return decoder


def make_placement(
    num_slots: int = 4, context_length: int = CONTEXT_LENGTH, linear_backend: str = "plain"
) -> Placement:
    return Placement(
        num_slots=num_slots,
        context_length=context_length,
        device=torch.device("cpu"),
        dtype=torch.float32,
        linear_backend=linear_backend,
    )


def make_cache(*, num_slots: int, capacity: int, num_layers: int, num_kv_heads: int, head_dim: int) -> SlotCache:
    shapes = replace(_BASE, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
    return SlotCache(shapes, make_placement(num_slots, capacity), num_open=0)


def make_tokenizer() -> Tokenizer:
    backend = Backend(models.WordLevel({char: index for index, char in enumerate(ALPHABET)}, unk_token="$"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["$"])
    return Tokenizer(backend, special_tokens={"eos_token": "$"}, eos_token_ids=[EOS_ID])


def make_target(name: str = "llama", seed: int = 0) -> LoadedTarget:
    return LoadedTarget(
        decoder=make_decoder(name, seed),
        tokenizer=Tokenizer.from_gguf(byte_vocabulary_fields(), name) if "bytes" in name else make_tokenizer(),
        name=name,
        path=Path("tiny"),
        dtype=torch.int8 if name.endswith("-int8") else torch.float32,
    )


def make_dflash(name: str = "llama", *, is_second: bool = False, seed: int = 1) -> DFlash:
    torch.manual_seed(seed)
    target = CONFIGS[name]
    shapes = replace(target, architecture="qwen3", num_layers=2, moe=None)
    config = DFlashConfig(
        layers=shapes,
        block_size=8,
        mask_token_id=VOCAB_SIZE - 1,
        tap_layers=(0, 2),
        num_target_layers=target.num_layers,
        conv_kernel_size=2 if is_second else 0,
        conv_group_size=8,
        selector_rank=6 if is_second else 0,
        selector_top_k=5,
    )
    model = DFlash(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    return model


def make_eagle3(
    name: str = "llama", *, draft_vocab_size: int = 40, has_embedding: bool = False, seed: int = 2
) -> Eagle3:
    torch.manual_seed(seed)
    target = CONFIGS[name]
    config = Eagle3Config(
        layers=replace(target, architecture="llama", num_layers=1, moe=None, is_tied=False),
        draft_vocab_size=draft_vocab_size,
        tap_layers=(0, 1, 2),
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        has_embedding=has_embedding,
    )
    model = Eagle3(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    model.draft_token_ids = torch.randperm(target.vocab_size)[:draft_vocab_size].sort().values
    return model


def make_llm(
    name: str = "llama", *, seed: int = 0, drafter: object = None, costs: StepCosts | None = None, **settings: object
) -> LLM:
    config = EngineConfig(**{"num_slots": 4, "token_budget": 16, "linear_backend": "plain", **settings})  # type: ignore[arg-type]
    return LLM(make_target(name, seed), drafter=drafter, pilot="ar", config=config, costs=costs)  # type: ignore[arg-type]


@dataclass
class ScriptedDrafter:
    """Drafts a known answer (always right), or every token one off (always wrong)."""

    answers: dict[tuple[int, ...], list[int]]  # prompt -> its whole answer
    shift: int = 0
    name: str = "scripted"
    tap_layers: tuple[int, ...] = ()
    block_size: int = 8
    max_block_size: int = MAX_BLOCK_SIZE
    seen: dict[int, list[int]] = field(default_factory=dict)

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            self.seen.setdefault(observation.slot, []).extend(observation.token_ids)

    def propose(self, requests: Sequence[DraftRequest]) -> list[HostDraft]:
        return [self._propose_one(request) for request in requests]

    def _propose_one(self, request: DraftRequest) -> HostDraft:
        history = [*self.seen[request.slot], request.anchor_id]
        prompt = next(prompt for prompt in self.answers if tuple(history[: len(prompt)]) == prompt)
        done = len(history) - len(prompt)
        ahead = self.answers[prompt][done : done + request.block_size - 1]
        ids = (np.array(ahead, dtype=np.int64).reshape(-1, 1) + self.shift) % VOCAB_SIZE
        return Draft(ids, np.zeros(ids.shape, dtype=np.float32))

    def forget(self, slot: int) -> None:
        self.seen.pop(slot, None)


@dataclass
class RandomTreePilot(Pilot):
    """Checks an arbitrary tree of candidates: any parent, any rank, drafted at any size."""

    seed: int
    name: str = "random-tree"
    num_candidates: int = 4

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def choose(self, requests: Sequence[Asked]) -> list[Choice]:
        return [Choice(self.random.randint(0, 12)) for _ in requests]

    def select(self, requests: Sequence[Drafted]) -> list[Selection]:
        return [Selection(DraftTree.build(one.anchor_id, self._nodes(one.draft))) for one in requests]

    def _nodes(self, candidates: HostDraft) -> list[tuple[int, int]]:
        nodes: list[tuple[int, int]] = []
        depths = [0]
        for _ in range(self.random.randint(0, 20)):
            parent = self.random.randrange(len(depths))
            if depths[parent] < candidates.num_positions:
                rank = self.random.randrange(candidates.width)
                nodes.append((parent, int(candidates.token_ids[depths[parent], rank])))
                depths.append(depths[parent] + 1)
        return nodes
