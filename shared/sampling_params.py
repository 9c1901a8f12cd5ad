"""What a request asks of the sampler. Validated once, at the router; the same frozen object crosses to decode unchanged."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

GREEDY_TEMPERATURE = 1e-5
"""Below this a row is greedy: argmax, never a division by the temperature."""


class StructuredOutput(BaseModel):
    """A grammar that the answer must match, as llguidance reads it (shared/grammar.py), and the request field that asked for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grammar: str
    param: str


class SamplingParams(BaseModel):
    """Immutable; `decode(encode(p)) == p` for every field. "Off" values: top_k <= 0, top_p 1, min_p 0, penalties 0 / 0 / 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(1.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    top_k: int = Field(-1, ge=-1)
    min_p: float = Field(0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100.0, allow_inf_nan=False)
    logit_bias: dict[int, float] = Field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    """Texts that must not occur in the output, however it is cut into tokens."""
    structured_output: StructuredOutput | None = None
    seed: int | None = None
    max_tokens: int = Field(16, ge=0)
    """0: the prompt is computed, for its log-probabilities, and nothing is generated."""
    min_tokens: int = Field(0, ge=0)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = Field(None, ge=0)
    """None: no logprobs. N: the sampled token's raw log-probability, its rank, and the N most likely tokens."""

    num_prompt_logprobs: int | None = Field(None, ge=0)
    """None: none. N: of every prompt token but the first, the same as `num_logprobs` gives of a generated one."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


class BeamSearchParams(BaseModel):
    """Search `width` hypotheses wide instead of drawing; scores are sums of log-probabilities / num_generated_tokens ** length_penalty."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int = Field(ge=1)
    length_penalty: float = Field(1.0, ge=-10.0, le=10.0)
    early_stopping: bool = False
    """True: done when `width` hypotheses have ended. False: when, besides, no live one scores better than the worst of them."""
