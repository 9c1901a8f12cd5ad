from __future__ import annotations

import itertools
import random

import pytest

from shared.text.stop_strings import StopStringMatcher

ABC_PIECES = ["DEF", "GH", "I", "J", "K", "LM", "N", "OP", "QR", "ST", "UV", "W"]


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None, list[str]]:
    matcher = StopStringMatcher(stops, include)
    shown: list[str] = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.matched is not None:
            break
    shown.append(matcher.flush())
    return "".join(shown), matcher.matched, shown


@pytest.mark.parametrize(
    ("stops", "text", "matched"),
    [
        (["DEFGHIJ"], "", "DEFGHIJ"),
        (["FGHI"], "DE", "FGHI"),
        (["IJ", "GHIJ"], "DEF", "GHIJ"),
        (["W"], "DEFGHIJKLMNOPQRSTUV", "W"),
        (["ZZZ"], "DEFGHIJKLMNOPQRSTUVW", None),
        (["E"], "D", "E"),
        (["M"], "DEFGHIJKL", "M"),
        (["WXYZ!"], "DEFGHIJKLMNOPQRSTUVW", None),
        ([""], "DEFGHIJKLMNOPQRSTUVW", None),
    ],
)
def test_stop_string_over_token_boundaries(stops: list[str], text: str, matched: str | None) -> None:
    assert run(stops, ABC_PIECES)[:2] == (text, matched)


def test_included_stop_string_ends_the_text() -> None:
    assert run(["FGHI"], ABC_PIECES, include=True)[0] == "DEFGHI"


def test_nothing_is_held_that_cannot_become_a_stop_string() -> None:
    matcher = StopStringMatcher(["XYZXYZ"])
    assert [matcher.push(piece) for piece in ABC_PIECES] == ABC_PIECES
    assert matcher.num_held == 0


def test_only_the_possible_beginning_is_held() -> None:
    matcher = StopStringMatcher(["ababc"])
    assert matcher.push("xxabab") == "xx"
    assert matcher.num_held == 4
    assert matcher.push("a") == "ab"  # "aba" may still begin it
    assert matcher.push("bc") == ""
    assert matcher.matched == "ababc"


def test_everything_after_the_match_is_dropped() -> None:
    matcher = StopStringMatcher(["b"])
    assert matcher.push("abc") == "a"
    assert (matcher.push("more"), matcher.flush()) == ("", "")


def brute_force(stops: list[str], text: str) -> tuple[str, str | None]:
    """Ends at the first character that completes a stop string, leftmost start among those that end there."""
    for end in range(1, len(text) + 1):
        starts = [(end - len(stop), stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            start, stop = min(starts)
            return text[:start], stop
    return text, None


def test_result_depends_on_the_text_alone_and_never_runs_ahead() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices("abc", weights=[5, 5, 1], k=rng.randint(0, 14)))
        cuts = sorted(rng.sample(range(len(text) + 1), k=min(len(text), rng.randint(0, 4))))
        pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
        shown, matched, _ = run(stops, pieces)
        assert (shown, matched) == brute_force(stops, text), (stops, pieces)
