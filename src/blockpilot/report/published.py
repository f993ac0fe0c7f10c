"""What the BlockPilot paper (arXiv 2606.31315) reports: means over its tasks on an H100, 2048 new tokens."""

from dataclasses import dataclass

Pair = tuple[float, float]  # speedup, tau


@dataclass(frozen=True)
class PublishedLine:
    model: str
    temperature: float
    eagle3: Pair | None
    dflash: Pair
    blockpilot: Pair


PUBLISHED = (
    PublishedLine("Qwen3-4B", 0, (1.70, 2.95), (3.99, 6.31), (4.17, 6.59)),
    PublishedLine("Qwen3-4B", 1, (1.70, 2.88), (3.80, 5.35), (4.20, 5.92)),
    PublishedLine("Qwen3-8B", 0, (1.75, 2.93), (4.42, 6.13), (4.66, 6.46)),
    PublishedLine("Qwen3-8B", 1, (1.65, 2.77), (3.55, 5.00), (3.94, 5.55)),
    PublishedLine("Llama-3.1-8B", 0, None, (3.03, 4.48), (3.25, 4.82)),
    PublishedLine("Qwen3-Coder-30B-A3B", 0, None, (3.86, 5.68), (4.12, 6.05)),
)
