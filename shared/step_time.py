"""How long a step takes on this machine: t(n) = slowdown x (fixed + per_token x n), so that a step can be cut to fit a time bound.

The shape (fixed, per_token) is measured once, at warm-up; the slowdown follows what steps really take (longer contexts, other
load). A plain tokens-a-second average would not do: small steps are slow per token because of the fixed part, so the average
falls, the next step is cut smaller still, and a machine that was busy for a moment would stay at the smallest step for good.
"""

from __future__ import annotations

REFERENCE_TOKENS = 128


class StepTimeModel:
    WEIGHT = 0.3
    MAX_RATIO = 4.0
    """One outlier (a stalled machine) moves the average no more than this."""

    def __init__(self) -> None:
        self.fixed_s = 0.0
        self.per_token_s = 0.0
        self.slowdown = 1.0

    def calibrate(self, small: tuple[int, float], large: tuple[int, float]) -> None:
        """Two measured steps (num_tokens, seconds) of different size."""
        (small_tokens, small_s), (large_tokens, large_s) = small, large
        assert small_tokens < large_tokens
        # At least a tenth of the mean cost per token: timing noise must not make tokens look free.
        self.per_token_s = max((large_s - small_s) / (large_tokens - small_tokens), 0.1 * large_s / large_tokens)
        self.fixed_s = max(0.0, large_s - self.per_token_s * large_tokens)
        self.slowdown = 1.0

    @property
    def is_calibrated(self) -> bool:
        return self.per_token_s > 0.0

    def predict_s(self, num_tokens: int) -> float:
        return self.slowdown * (self.fixed_s + self.per_token_s * num_tokens)

    def record(self, num_tokens: int, step_s: float) -> None:
        """A step of prompts took `step_s`."""
        if not self.is_calibrated or num_tokens <= 0 or step_s <= 0:
            return
        ratio = step_s / (self.fixed_s + self.per_token_s * num_tokens)
        ratio = min(max(ratio, self.slowdown / self.MAX_RATIO), self.slowdown * self.MAX_RATIO)
        self.slowdown += self.WEIGHT * (ratio - self.slowdown)

    def tokens_within(self, limit_s: float) -> int | None:
        """Tokens of a step that ends within `limit_s`, perhaps 0; None before calibration."""
        if not self.is_calibrated:
            return None
        return max(0, int((limit_s / self.slowdown - self.fixed_s) / self.per_token_s))

    @property
    def tokens_per_s(self) -> float:
        """Speed at REFERENCE_TOKENS a step; 0 before calibration."""
        return REFERENCE_TOKENS / self.predict_s(REFERENCE_TOKENS) if self.is_calibrated else 0.0
