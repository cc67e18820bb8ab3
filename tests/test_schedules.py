"""Knobs that are a name with numbers, and learning rates over the rounds: values by hand, laws, refusals."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.errors import UserError
from fedmpi.local import Descent, LocalKnobs
from fedmpi.schedules import Rate, as_rate, form, make_rate, read_spec

SCHEDULES = st.one_of(
    st.just("constant"),
    st.just("cosine"),
    st.floats(0, 1).map(lambda last: f"cosine:{last!r}"),
    st.tuples(st.integers(1, 40), st.floats(0, 1)).map(lambda p: f"step:{p[0]},{p[1]!r}"),
)
FORMS = ("constant", "step:rounds,factor", "cosine[:last]")


def rates(schedule: str, lr: float, rounds: int) -> list[float]:
    """Return the rates of all rounds."""
    rate = make_rate("--local.schedule", schedule, lr, rounds)
    return [rate(t) for t in range(1, rounds + 1)]


def refusal(schedule: str) -> str:
    """Return the error message that a schedule is refused with."""
    with pytest.raises(UserError) as caught:
        make_rate("--server.schedule", schedule, 0.1, 100)
    return str(caught.value)


# Learning rates by hand


def test_a_constant_rate_is_the_rate_to_the_bit() -> None:
    assert rates("constant", 0.1, 4) == [0.1] * 4


def test_steps_by_hand() -> None:
    # every 2 rounds times 1/4: 8 8 | 2 2 | 0.5 0.5 | 0.125
    assert rates("step:2,0.25", 8.0, 7) == [8.0, 8.0, 2.0, 2.0, 0.5, 0.5, 0.125]


def test_a_step_falls_after_its_rounds_and_not_before() -> None:
    rate = make_rate("--local.schedule", "step:30,0.1", 1.0, 100)
    assert [rate(t) for t in (1, 30, 31, 60, 61, 90, 91)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01, 0.001])


def test_half_a_cosine_by_hand() -> None:
    # over 6 rounds the angles are 0, 30, ... 150 degrees: (1 + cos) / 2
    root = math.sqrt(3) / 2
    assert rates("cosine", 2.0, 6) == pytest.approx([2, 1 + root, 1.5, 1, 0.5, 1 - root])


def test_a_cosine_towards_a_tenth_by_hand() -> None:
    # over 4 rounds the halves are 1, (1 + r) / 2, 1/2, (1 - r) / 2 with r = cos 45 degrees; then 0.1 + 0.9 * that
    root = math.sqrt(0.5)
    assert rates("cosine:0.1", 1.0, 4) == pytest.approx([1, 0.55 + 0.45 * root, 0.55, 0.55 - 0.45 * root])


def test_a_warm_up_rises_in_a_line_and_the_cosine_has_the_rounds_after_it() -> None:
    # 4 rounds of 10 warm up: 1/5 ... 4/5; then half a cosine over 6 rounds, as above
    root = math.sqrt(3) / 4
    expected = [0.2, 0.4, 0.6, 0.8, 1, 0.5 + root, 0.75, 0.5, 0.25, 0.5 - root]
    assert rates("warmup:4+cosine", 1.0, 10) == pytest.approx(expected)


def test_steps_are_counted_from_the_end_of_the_warm_up() -> None:
    # 1/2 in round 1, then 2 rounds each of 1, 1/2, 1/4
    assert rates("warmup:1+step:2,0.5", 1.0, 7) == [0.5, 1, 1, 0.5, 0.5, 0.25, 0.25]


def test_a_warm_up_alone_ends_in_a_constant_rate() -> None:
    assert rates("warmup:3", 0.4, 6) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert rates("warmup:3+constant", 0.4, 6) == rates("warmup:3", 0.4, 6)


def test_a_warm_up_longer_than_the_run_is_cut_off() -> None:
    assert rates("warmup:9+cosine", 1.0, 3) == pytest.approx([0.1, 0.2, 0.3])


def test_the_last_rate_is_not_yet_nothing() -> None:
    assert all(rate > 0 for rate in rates("cosine", 0.1, 500))
    assert rates("cosine", 0.1, 1) == [0.1]


def test_a_number_is_a_rate_and_a_rate_is_itself() -> None:
    assert [as_rate(0.3)(t) for t in (1, 2, 1000)] == [0.3] * 3

    def rate(t: int) -> float:
        return 1 / t

    assert as_rate(rate) is rate


def test_knobs_and_descents_take_numbers_and_rates() -> None:
    class AtRound:
        round = 4

    def rate(t: int) -> float:
        return 1 / t

    assert LocalKnobs(lr=0.3).rate(4) == 0.3 and LocalKnobs(lr=rate).rate(4) == 0.25
    assert Descent(0.3).rate(AtRound()) == 0.3 and Descent(rate).rate(AtRound()) == 0.25


# Their laws


@given(SCHEDULES, st.floats(1e-6, 10), st.integers(1, 200), st.integers(0, 50))
def test_a_rate_rises_to_the_full_one_and_never_again(schedule: str, lr: float, rounds: int, warm: int) -> None:
    all_rates = rates(f"warmup:{warm}+{schedule}" if warm else schedule, lr, rounds)
    rising, falling = all_rates[:warm], all_rates[warm:]
    assert all(a < b for a, b in zip(rising, rising[1:], strict=False)) and all(0 < rate < lr for rate in rising)
    assert all(a >= b for a, b in zip(falling, falling[1:], strict=False)) and all(0 <= rate for rate in falling)
    if falling:
        assert falling[0] == pytest.approx(lr, rel=1e-12) and (not rising or rising[-1] < falling[0])


@given(SCHEDULES, st.integers(1, 50), st.integers(1, 20))
def test_a_warm_up_only_puts_the_schedule_off(schedule: str, rounds: int, warm: int) -> None:
    assert rates(f"warmup:{warm}+{schedule}", 0.5, warm + rounds)[warm:] == rates(schedule, 0.5, rounds)


@given(SCHEDULES, st.permutations(range(1, 20)))
def test_a_rate_depends_on_its_round_alone(schedule: str, order: list[int]) -> None:
    rate: Rate = make_rate("--local.schedule", f"warmup:3+{schedule}", 0.5, 19)
    assert [rate(t) for t in order] == [rates(f"warmup:3+{schedule}", 0.5, 19)[t - 1] for t in order]


# Schedules that are refused


@pytest.mark.parametrize(
    "schedule, message",
    [
        ("step", "--server.schedule is 'step'; write it as step:rounds,factor, with numbers"),
        ("step:30", "--server.schedule is 'step:30'; write it as step:rounds,factor, with numbers"),
        ("step:30;0.1", "--server.schedule is 'step:30;0.1'; write it as step:rounds,factor, with numbers"),
        ("step:0,0.1", "--server.schedule is 'step:0,0.1'; a step takes a whole number of rounds, 1 or more"),
        ("step:2.5,0.1", "--server.schedule is 'step:2.5,0.1'; a step takes a whole number of rounds, 1 or more"),
        ("step:-3,0.1", "--server.schedule is 'step:-3,0.1'; a step takes a whole number of rounds, 1 or more"),
        ("step:3,1.5", "--server.schedule is 'step:3,1.5'; its factor must lie in [0, 1]"),
        ("step:3,-0.5", "--server.schedule is 'step:3,-0.5'; its factor must lie in [0, 1]"),
        ("cosine:-1", "--server.schedule is 'cosine:-1'; its factor must lie in [0, 1]"),
        ("cosine:2", "--server.schedule is 'cosine:2'; its factor must lie in [0, 1]"),
        ("cosine:0,1", "--server.schedule is 'cosine:0,1'; write it as cosine[:last], with numbers"),
        ("warmup", "--server.schedule is 'warmup'; write it as warmup:rounds, with numbers"),
        ("warmup+cosine", "--server.schedule is 'warmup'; write it as warmup:rounds, with numbers"),
        (
            "warmup:0+cosine",
            "--server.schedule is 'warmup:0+cosine'; a warm-up takes a whole number of rounds, 1 or more",
        ),
        ("warmup:1.5", "--server.schedule is 'warmup:1.5'; a warm-up takes a whole number of rounds, 1 or more"),
        (
            "warmup:3+",
            "--server.schedule is 'warmup:3+'; a '+' stands between a warm-up and a schedule: warmup:rounds+cosine",
        ),
    ],
)
def test_a_refused_schedule_names_what_is_valid(schedule: str, message: str) -> None:
    assert refusal(schedule) == message


@pytest.mark.parametrize(
    "schedule, opening",
    [
        ("cosin", "unknown --server.schedule 'cosin'; did you mean 'cosine[:last]'? known: "),
        ("linear:3", "unknown --server.schedule 'linear:3'; known: "),
        ("", "unknown --server.schedule ''; known: "),
        ("warmup:3+linear", "unknown --server.schedule 'linear'; known: "),
    ],
)
def test_an_unknown_schedule_names_all_there_are(schedule: str, opening: str) -> None:
    message = refusal(schedule)
    assert message.startswith(opening) and all(known in message for known in FORMS)


@pytest.mark.parametrize("schedule", ["warmpu:3+cosine", "warm:3", "cosine+warmup:3", "warmups:3+cosine"])
def test_the_error_shows_how_to_write_a_warm_up(schedule: str) -> None:
    assert "warmup:rounds" in refusal(schedule)


# A name with numbers

KNOWN = {"none": (), "pair": ("first", "second"), "maybe": ("last?",), "three": ("a", "b", "c?")}
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)


def spec_refusal(text: str) -> str:
    """Return the error message that a spec is refused with."""
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
        assert spec_refusal(text).startswith(f"--knob is '{text}'; write it as {form(name, KNOWN[name])}")


@pytest.mark.parametrize(
    "name, written",
    [("none", "none"), ("pair", "pair:first,second"), ("maybe", "maybe[:last]"), ("three", "three:a,b[,c]")],
)
def test_how_a_spec_is_written(name: str, written: str) -> None:
    assert form(name, KNOWN[name]) == written


def test_an_unknown_name_names_all_there_are_and_the_nearest() -> None:
    known = "known: none, pair:first,second, maybe[:last], three:a,b[,c]"
    assert spec_refusal("nothing") == f"unknown --knob 'nothing'; {known}"
    assert spec_refusal("piar:1,2") == f"unknown --knob 'piar:1,2'; did you mean 'pair:first,second'? {known}"
    assert spec_refusal("mabye") == f"unknown --knob 'mabye'; did you mean 'maybe[:last]'? {known}"
    assert spec_refusal("") == f"unknown --knob ''; {known}"
    assert spec_refusal("Pair:1,2").startswith("unknown --knob 'Pair:1,2'; ")


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
def test_numbers_too_few_too_many_or_none_at_all_are_shown_the_form(text: str) -> None:
    assert spec_refusal(text) == f"--knob is '{text}'; write it as pair:first,second, with numbers"


@pytest.mark.parametrize("text", ["maybe:", "maybe:1,2", "maybe:x"])
def test_a_number_that_may_be_left_out_must_still_be_one(text: str) -> None:
    assert spec_refusal(text) == f"--knob is '{text}'; write it as maybe[:last], with numbers"


@pytest.mark.parametrize("text", ["none:", "none:1"])
def test_the_error_of_a_name_without_numbers_asks_for_none(text: str) -> None:
    assert spec_refusal(text).startswith(f"--knob is '{text}'; write it as none")
    assert "with numbers" not in spec_refusal(text)
