from __future__ import annotations

from dataclasses import replace

from services.router.broken_pairs import AVOIDED_S, BrokenPairs
from services.router.policy import Candidate, RequestFacts, Route, select
from shared.cache.prefix_index import Holder
from shared.clock import ManualClock

P0, P1, D0, D1 = (Holder(name, 1) for name in ("p0", "p1", "d0", "d1"))
FACTS = RequestFacts(num_prompt_tokens=512, local_prefill_max_tokens=16)


def workers(*names: str) -> list[Candidate]:
    return [Candidate(name, 1, tokens_per_s=1000) for name in names]


def test_a_pair_that_fails_twice_in_a_row_is_avoided_for_a_while_and_then_tried_again() -> None:
    clock = ManualClock()
    pairs = BrokenPairs(clock)
    pairs.note_failure((P0, D0), "no way")
    assert not pairs.avoided()
    pairs.note_failure((P0, D0), "no way")
    assert pairs.avoided() == {(P0, D0)}
    clock.advance(AVOIDED_S + 1)
    assert not pairs.avoided()
    pairs.note_failure((P0, D0), "no way")
    assert pairs.avoided() == {(P0, D0)}, "one try that fails is enough"
    pairs.note_success((P0, D0))
    assert not pairs.avoided()


def test_failures_with_successes_between_them_are_no_broken_pair() -> None:
    pairs = BrokenPairs(ManualClock())
    for _ in range(10):
        pairs.note_failure((P0, D0), "a fault")
        pairs.note_success((P0, D0))
        pairs.note_failure((P0, D1), "a fault of another pair")
    assert pairs.avoided() == {(P0, D1)}


def test_an_avoided_pair_is_chosen_only_where_there_is_no_other() -> None:
    def route(prefill: list[Candidate], decode: list[Candidate], *avoided: tuple[Holder, Holder]) -> tuple[str, str]:
        chosen = select(FACTS, prefill, decode, frozenset(avoided))
        assert chosen is not None and chosen.prefill is not None
        return chosen.prefill.worker_id, chosen.decode.worker_id

    prefill, decode = workers("p0", "p1"), workers("d0", "d1")
    assert route(prefill, decode) == ("p0", "d0")
    assert route(prefill, decode, (P0, D0)) == ("p1", "d0")
    assert route(prefill, workers("d0"), (P0, D0)) == ("p1", "d0")
    assert route(workers("p0"), workers("d0"), (P0, D0)) == ("p0", "d0")
    assert route(prefill, decode, (P0, D0), (P1, D0)) == ("p0", "d1")


def test_a_prefix_is_pulled_over_no_avoided_pair_even_where_the_transfer_has_to_take_one() -> None:
    holder, idle = Candidate("p0", 1, overlap_blocks=31, num_requests=50, tokens_per_s=1000), Candidate("p1", 1, tokens_per_s=1000)

    def route(*avoided: tuple[Holder, Holder]) -> Route:
        chosen = select(replace(FACTS, num_prompt_tokens=600), [holder, idle], workers("d0"), frozenset(avoided))
        assert chosen is not None and chosen.prefill is not None
        return chosen

    pulling = route()
    assert pulling.prefill == idle and pulling.pull is not None and pulling.pull.holder == holder
    for avoided in ([(P0, P1)], [(P0, P1), (P0, D0), (P1, D0)]):
        assert route(*avoided).pull is None
    assert route((P1, P0)).pull is not None, "the other direction is another matter"
