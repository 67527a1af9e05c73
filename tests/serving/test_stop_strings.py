"""A text ends before a stop string, however it is cut into pieces."""

import random

import pytest

from kvpool.serving.stop_strings import StopStrings


def through(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    strings = StopStrings(stops)
    text = "".join(map(strings.add, pieces))
    return text + strings.finish(), strings.has_stopped


@pytest.mark.parametrize(
    ("stops", "text", "kept"),
    [
        (["END"], "one END two", "one "),
        (["END"], "one EN", "one EN"),
        (["END"], "ENEND", "EN"),
        (["aab"], "aaab", "a"),
        (["x", "yx"], "ayx", "a"),
        (["abcd", "bc"], "abcd", "a"),
        (["\n\n"], "a\nb\n", "a\nb\n"),
        ([], "anything", "anything"),
        (["é€"], "aé€b", "a"),
    ],
)
def test_the_text_before_a_stop_is_kept_wherever_it_is_cut(stops: list[str], text: str, kept: str) -> None:
    expected = (kept, kept != text)
    assert through(stops, [text]) == expected
    assert through(stops, list(text)) == expected
    for cut in range(len(text)):
        assert through(stops, [text[:cut], text[cut:]]) == expected


def test_no_piece_has_what_may_begin_a_stop() -> None:
    strings = StopStrings(["END"])
    assert [strings.add(piece) for piece in ("a", "E", "N", "x", "E", "ND", "y")] == ["a", "", "", "ENx", "", "", ""]
    assert strings.has_stopped
    assert strings.finish() == ""


def test_random_texts_do_not_depend_on_their_pieces(rng: random.Random) -> None:
    for _ in range(500):
        text = "".join(rng.choices("ab", k=20))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        pieces, at = [], 0
        while at < len(text):
            stop = at + rng.randint(1, 6)
            pieces.append(text[at:stop])
            at = stop
        assert through(stops, pieces) == through(stops, list(text)), (stops, pieces)
