"""What the router asks for is what decode gets: nothing is lost, added or rounded on the way."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.messages import (
    DecodeRequest,
    PrefixPull,
    RequestOutput,
    TokenLogprobs,
    decode_batch,
    decode_router_message,
    encode,
    encode_batch,
)
from shared.sampling_params import BeamSearchParams, SamplingParams, StructuredOutput

_INT64 = st.integers(-(2**63), 2**63 - 1)
_IDS = st.lists(st.integers(0, 49151), max_size=4).map(tuple)
_TEXT = st.text(max_size=8)

SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, allow_infinity=False, allow_nan=False),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 2**63 - 1),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 100),
    "logit_bias": st.dictionaries(st.integers(0, 49151), st.floats(-100, 100), max_size=4),
    "allowed_token_ids": st.none() | _IDS,
    "bad_words": st.lists(_TEXT, max_size=3).map(tuple),
    "structured_output": st.none() | st.builds(StructuredOutput, grammar=_TEXT, param=_TEXT),
    "seed": st.none() | _INT64,
    "max_tokens": st.integers(0, 2**63 - 1),
    "min_tokens": st.integers(0, 2**63 - 1),
    "stop_token_ids": _IDS,
    "ignore_eos": st.booleans(),
    "num_logprobs": st.none() | st.integers(0, 20),
    "num_prompt_logprobs": st.none() | st.integers(0, 20),
}
BEAM_SEARCH: dict[str, st.SearchStrategy[Any]] = {
    "width": st.integers(1, 16),
    "length_penalty": st.floats(-10, 10),
    "early_stopping": st.booleans(),
}
REQUEST: dict[str, st.SearchStrategy[Any]] = {
    "request_id": _TEXT,
    "transfer_id": st.none() | _TEXT,
    "attempt": st.integers(0, 9),
    "token_ids": _IDS,
    "sampling": st.builds(SamplingParams, **SAMPLING),
    "num_sequences": st.integers(1, 16),
    "beam_search": st.none() | st.builds(BeamSearchParams, **BEAM_SEARCH),
    "cache_salt": st.none() | _TEXT,
    "prefix_pull": st.none() | st.builds(PrefixPull, transfer_id=_TEXT, num_blocks=st.integers(1, 2**31), timeout_s=st.floats(0, 1e6)),
    "deadline_s": st.floats(0, 1e6),
    "priority": _INT64,
    "traceparent": _TEXT,
}


def test_every_field_is_tried() -> None:
    for strategies, model in ((SAMPLING, SamplingParams), (BEAM_SEARCH, BeamSearchParams), (REQUEST, DecodeRequest)):
        assert set(strategies) == set(model.model_fields) - {"version", "kind"}


@given(st.builds(DecodeRequest, **REQUEST))
@settings(max_examples=40)
def test_every_field_of_a_request_reaches_decode_as_it_was(request: DecodeRequest) -> None:
    arrived = decode_router_message(encode(request))
    assert arrived == request
    # 0 == False and (1,) == (1.0,) in Python, but not here.
    assert repr(arrived) == repr(request)


def test_off_and_absent_stay_apart() -> None:
    plain = DecodeRequest(request_id="r", transfer_id=None, token_ids=(1,), sampling=SamplingParams(), deadline_s=1)
    assert (plain.sampling.num_logprobs, plain.sampling.seed, plain.sampling.allowed_token_ids) == (None, None, None)
    zero = plain.model_copy(update={"sampling": SamplingParams(num_logprobs=0, seed=0, temperature=0.0, max_tokens=0)})
    for request in (plain, zero):
        assert repr(decode_router_message(encode(request))) == repr(request)


@given(st.lists(st.floats(-1e30, 0), max_size=3), _IDS)
@settings(max_examples=20)
def test_log_probabilities_come_back_to_the_last_bit(logprobs: list[float], ids: tuple[int, ...]) -> None:
    entry = TokenLogprobs(logprob=-1e-300, rank=1, top_token_ids=ids, top_logprobs=tuple(logprobs))
    output = RequestOutput(request_id="r", token_id=0, index=0, logprobs=entry, finish_reason="stop", stop_token_id=0)
    assert repr([message for frame in encode_batch([output]) for message in decode_batch(frame)]) == repr([output])
