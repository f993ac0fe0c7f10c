"""Guides at work: which tokens may follow, which drafted ones never could, and which are the only way on.

llguidance follows the text in a parser of its own, token by token, and can go back. A tree is pruned before its check:
nodes that the guide forbids are not paid for. Tokens that are forced are drafted for nothing. What is emitted is the
best of the allowed tokens after each node, so the text is that of plain decoding under the same guide.
"""

import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.guide import Guide
from blockpilot.core.tree import DraftTree
from blockpilot.text.tokenizer import Tokenizer

_MAX_GRAMMARS = 32  # kept compiled


class GuideMaker:
    """Compiles guides for one vocabulary. The library is loaded when the first one is asked for."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, list(eos_token_ids)
        self._compile = lru_cache(_MAX_GRAMMARS)(self._compile_guide)
        self._vocabulary: Any = None

    def make(self, guide: Guide) -> "GuideState":
        """For one request, at the beginning of its answer. Any thread may call this."""
        return GuideState(self._compile(guide).deep_copy(), self.vocab_size)

    def _compile_guide(self, guide: Guide) -> Any:
        if importlib.util.find_spec("llguidance") is None:
            raise InputError("guides need the package llguidance: pip install 'blockpilot[guides]'")
        from llguidance import LLMatcher

        if not self.eos_token_ids:
            raise InputError("a guide needs a model that knows its end-of-text token, and this one names none")
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        make: dict[str, Any] = {"json": LLMatcher.grammar_from_json_schema, "regex": LLMatcher.grammar_from_regex}
        try:
            grammar = make.get(guide.kind, LLMatcher.grammar_from_lark)(guide.text)
        except ValueError as error:
            raise InputError(f"the guide's {guide.kind} cannot be used: {_one_line(error)}") from error
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise InputError(f"the guide's {guide.kind} cannot be used: {_one_line(matcher.get_error())}")
        return matcher

    def _read_vocabulary(self) -> Any:
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(self.tokenizer.backend.to_str(), n_vocab=self.vocab_size, eos_token=self.eos_token_ids)
        except ValueError as error:
            raise InputError(f"guides cannot read this model's tokenizer: {_one_line(error)}") from error


class GuideState:
    """Where one answer stands in its guide."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._num_followed = 0

    def follow(self, output_ids: Sequence[int]) -> None:
        """The answer has grown up to here."""
        new = list(output_ids[self._num_followed :])
        if new and not self._matcher.consume_tokens(new):
            raise BlockPilotError(f"the guide lost its way: {_one_line(self._matcher.get_error())}")
        self._num_followed = len(output_ids)

    def allowed(self, path: Sequence[int]) -> Tensor:
        """Which tokens [V] may come behind a path of drafted ones, all of them allowed."""
        taken = self._matcher.try_consume_tokens(list(path)) if path else 0
        try:
            bias = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        finally:
            if taken:
                self._matcher.rollback(taken)
        if self._matcher.is_error() or taken < len(path):
            raise BlockPilotError(f"the guide is too much for its parser: {_one_line(self._matcher.get_error())}")
        return bias[: self._vocab_size] > 0

    def prune(self, tree: DraftTree, *, max_depth: int) -> DraftTree:
        """The tree without the nodes that are forbidden, and with the tokens that are forced from its anchor on."""
        kept = self._kept(tree)
        forced = self._matcher.compute_ff_tokens()[:max_depth]
        if len(kept) == len(tree) and not forced:
            return tree
        places = {node: place for place, node in enumerate(kept)}
        nodes = [(places[tree.parents[node]], tree.token_ids[node]) for node in kept[1:]]
        return DraftTree.build(tree.token_ids[0], _with_chain(nodes, forced))

    def _kept(self, tree: DraftTree) -> list[int]:
        """Nodes all of whose paths are allowed, in their order."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents[1:], start=1):
            children.setdefault(parent, []).append(node)
        kept, todo = [0], [(child, 0) for child in reversed(children.get(0, ()))]  # nodes and how many stand above
        depth = 0  # tokens that the matcher has taken
        while todo:
            node, above = todo.pop()
            if depth > above:
                self._matcher.rollback(depth - above)
            depth = above + self._matcher.try_consume_tokens([tree.token_ids[node]])
            if depth > above:
                kept.append(node)
                todo += [(child, depth) for child in reversed(children.get(node, ()))]
        if depth:
            self._matcher.rollback(depth)
        return sorted(kept)


def _with_chain(nodes: list[tuple[int, int]], chain: Sequence[int]) -> list[tuple[int, int]]:
    """A chain from the anchor on, sharing nodes that are there."""
    at, places = 0, {node: place for place, node in enumerate(nodes, start=1)}
    for token_id in chain:
        if (at, token_id) not in places:
            if len(nodes) >= MAX_TREE_NODES:
                break
            nodes.append((at, token_id))
            places[at, token_id] = len(nodes)
        at = places[at, token_id]
    return nodes


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]
