"""Knobs that are a name with numbers behind it: what is read, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.errors import UserError
from fedmpi.schedules import form, read_spec

KNOWN = {"none": (), "pair": ("first", "second"), "maybe": ("last?",), "three": ("a", "b", "c?")}
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


def refusal(text: str) -> str:
    """The sentence that a spec is refused with."""
    with pytest.raises(UserError) as caught:
        read_spec("--knob", text, KNOWN)
    return str(caught.value)


@pytest.mark.parametrize(
    "text, name, numbers",
    [
        ("none", "none", {}),
        ("pair:1,2", "pair", {"first": 1.0, "second": 2.0}),
        ("pair:0.3,1e-2", "pair", {"first": 0.3, "second": 0.01}),
        ("pair:-1,.5", "pair", {"first": -1.0, "second": 0.5}),
        ("maybe", "maybe", {}),
        ("maybe:7", "maybe", {"last": 7.0}),
        ("three:1,2", "three", {"a": 1.0, "b": 2.0}),
        ("three:1,2,3", "three", {"a": 1.0, "b": 2.0, "c": 3.0}),
    ],
)
def test_a_spec_is_its_name_and_its_numbers_by_name(text: str, name: str, numbers: dict[str, float]) -> None:
    assert read_spec("--knob", text, KNOWN) == (name, numbers)


@given(st.sampled_from(sorted(KNOWN)), st.lists(NUMBERS, max_size=3))
def test_what_is_written_is_read_back_to_the_bit_or_refused(name: str, numbers: list[float]) -> None:
    text = f"{name}:{','.join(map(repr, numbers))}" if numbers else name
    least = sum(not word.endswith("?") for word in KNOWN[name])
    if least <= len(numbers) <= len(KNOWN[name]):
        assert list(read_spec("--knob", text, KNOWN)[1].values()) == numbers
    else:
        assert refusal(text).startswith(f"--knob is '{text}'; write it as {form(name, KNOWN[name])}")


@pytest.mark.parametrize(
    "name, written",
    [("none", "none"), ("pair", "pair:first,second"), ("maybe", "maybe[:last]"), ("three", "three:a,b[,c]")],
)
def test_how_a_spec_is_written(name: str, written: str) -> None:
    assert form(name, KNOWN[name]) == written


def test_an_unknown_name_is_told_all_there_are_and_the_nearest() -> None:
    known = "known: none, pair:first,second, maybe[:last], three:a,b[,c]"
    assert refusal("nothing") == f"unknown --knob 'nothing'; {known}"
    assert refusal("piar:1,2") == f"unknown --knob 'piar:1,2'; did you mean 'pair:first,second'? {known}"
    assert refusal("mabye") == f"unknown --knob 'mabye'; did you mean 'maybe[:last]'? {known}"
    assert refusal("") == f"unknown --knob ''; {known}"
    assert refusal("Pair:1,2").startswith("unknown --knob 'Pair:1,2'; ")


@pytest.mark.parametrize(
    "text",
    [
        "pair",
        "pair:",
        "pair:1",
        "pair:1,2,3",
        "pair:one,2",
        "pair:1,",
        "pair:1;2",
        "pair:nan,1",
        "pair:1,inf",
        "pair:1:2",
    ],
)
def test_numbers_too_few_too_many_or_none_at_all_are_told_the_form(text: str) -> None:
    assert refusal(text) == f"--knob is '{text}'; write it as pair:first,second, with numbers"


@pytest.mark.parametrize("text", ["maybe:", "maybe:1,2", "maybe:x"])
def test_a_number_that_may_be_left_out_must_still_be_one(text: str) -> None:
    assert refusal(text) == f"--knob is '{text}'; write it as maybe[:last], with numbers"


@pytest.mark.parametrize("text", ["none:", "none:1"])
def test_a_name_that_takes_no_numbers_is_not_told_to_bring_some(text: str) -> None:
    assert refusal(text).startswith(f"--knob is '{text}'; write it as none")
    assert "with numbers" not in refusal(text)
