"""Inputs, candidates and drafts that several pilot tests share."""

import numpy as np

from blockpilot.core.candidates import Candidates
from blockpilot.pilots.base import PilotInputs
from blockpilot.pilots.fitting import ABSENT, Drafts


def make_inputs(**changes: float) -> PilotInputs:
    values = {
        "num_steps": 3,
        "context_length": 20,
        "batch_size": 1,
        "num_remaining": 100,
        "max_block_size": 64,
        "trained_block_size": 16,
        "temperature": 0.0,
        "last_emitted": 2,
    }
    return PilotInputs(**(values | changes))  # type: ignore[arg-type]


def log_softmax(scores: np.ndarray) -> np.ndarray:
    return (scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))).astype(np.float32)


def random_candidates(seed: int, *, depth: int = 7, width: int = 4, is_pairwise: bool = True) -> Candidates:
    random = np.random.default_rng(seed)
    ids = np.arange(depth * width, dtype=np.int64).reshape(depth, width) + 100
    marginals = -np.sort(-log_softmax(random.normal(size=(depth, width)) * 2))
    if not is_pairwise:
        return Candidates(ids, marginals)
    pairwise = log_softmax(random.normal(size=(depth - 1, width, width)) * 2)
    return Candidates(ids, marginals, log_softmax(random.normal(size=width) * 2), pairwise)


def sure_candidates(probability: float, depth: int = 15, width: int = 8) -> Candidates:
    """Every position's first token is right with the same probability; the rest is spread over the others."""
    row = np.full(width, (1 - probability) / width)
    row[0] = probability
    log_probs = np.log(np.tile(row, (depth, 1)).astype(np.float32))
    return Candidates(np.tile(np.arange(width, dtype=np.int64), (depth, 1)), log_probs)


def true_probabilities(scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """What scores [N, D, K] stand for: `truth` [D, (offset, slope)] on their logits, siblings excluding each other."""
    shares = np.exp(scores.astype(np.float64))
    logits = truth[:, 0, None] + truth[:, 1, None] * np.log(shares / (1 - shares))
    right = 1 / (1 + np.exp(-logits))
    return right / np.maximum(right.sum(axis=-1, keepdims=True), 1)


def make_drafts(
    truth: np.ndarray, *, num_anchors: int = 3000, depth: int = 4, width: int = 4, seed: int = 0, length: int = 50
) -> Drafts:
    """Answers of `length` anchors, drawn from what the scores stand for."""
    random = np.random.default_rng(seed)
    scores = log_softmax(random.normal(size=(num_anchors, depth, width)) * 1.5)
    draws = random.random((num_anchors, depth, 1))
    ranks = (draws > true_probabilities(scores, truth).cumsum(axis=-1)).sum(axis=-1)
    true_ranks = np.where(ranks < width, ranks, ABSENT).astype(np.uint8)
    return Drafts(log_probs=scores, true_ranks=true_ranks, starts=range(0, num_anchors, length))
