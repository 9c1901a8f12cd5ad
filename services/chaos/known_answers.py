"""Prompts whose greedy answers the packaged model is sure of, so that KV which is not theirs shows as another text.

FIXTURES are known from a reference run; the longer prompts, with a filler of unrelated words in front, get their answers from the stack
itself before the first fault, and only those are used whose every token leads the next best by far.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

FIXTURES: tuple[tuple[str, int, str], ...] = (
    ("1, 2, 3, 4, 5,", 12, " 6, 7, 8, 9,"),
    ("Here is the English alphabet: ABC", 8, "DEFGHIJKLMNOP"),
    ("The capital of France is", 1, " Paris"),
    ("\U0001f999" * 8, 9, "\U0001f999" * 3),
    ("世界" * 6, 10, "世界" * 2),
)
"""(prompt, max_tokens, greedy answer)."""
MIN_GAP = 0.5
"""By how much, in log-probability, each token of a robust answer leads the next."""
_WORDS = (
    "river", "stone", "cloud", "garden", "window", "paper", "music", "winter", "bridge", "market", "silver", "mountain", "letter",
    "harbour", "forest", "candle", "engine", "copper", "island", "morning", "shadow", "village", "thunder", "blanket", "corner",
    "meadow", "lantern", "orchard", "pepper", "railway", "saddle", "timber", "velvet",
)  # fmt: skip


@dataclass(frozen=True)
class KnownAnswer:
    prompt: str
    max_tokens: int
    text: str


def fixtures() -> list[KnownAnswer]:
    return [KnownAnswer(*fixture) for fixture in FIXTURES]


def draw_prompts(seed: int, count: int) -> list[tuple[str, int]]:
    """(prompt, max_tokens) of fixtures behind fillers of 4 to 50 words, each prompt another from its first block on."""
    draw = random.Random(seed)
    prompts = []
    for index in range(count):
        prompt, max_tokens, _ = FIXTURES[index % len(FIXTURES)]
        filler = " ".join(draw.choice(_WORDS) for _ in range(draw.randint(4, 50)))
        prompts.append((f"{filler}.\n\n{prompt}", max_tokens))
    return prompts


def smallest_gap(top_logprobs: list[dict[str, float]]) -> float:
    """Of the two best candidates of each token (`logprobs: 2`)."""
    gaps = []
    for candidates in top_logprobs:
        best = sorted(candidates.values(), reverse=True)
        gaps.append(best[0] - best[1] if len(best) > 1 else 0.0)
    return min(gaps, default=0.0)
