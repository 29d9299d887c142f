from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.router.calibration import KNOTS, Calibration, isotonic
from cluster.router.draft_wait import DraftWait, RoundTimes
from cluster.router.step_time import StepTimeCurve


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 5)), min_size=1, max_size=12))
def test_isotonic_regression_rises_keeps_the_mean_and_leaves_rising_values_alone(points):
    values, weights = np.array(points).T.copy()
    fitted = isotonic(values, weights)
    assert all(a <= b + 1e-9 for a, b in pairwise(fitted))
    assert np.dot(fitted, weights) == pytest.approx(np.dot(values, weights), abs=1e-6)
    assert isotonic(np.sort(values), weights) == pytest.approx(np.sort(values))


def feed(calibration, source, rounds, confidence, truth, random):
    for _ in range(rounds):
        values = confidence(random)
        calibration.observe(source, values, random.random(len(values)) < truth(values))
        calibration.end_round()
    calibration.refresh()


def test_calibration_finds_what_an_overconfident_source_is_worth():
    random = np.random.default_rng(1)
    calibration = Calibration(2)
    feed(calibration, 0, 400, lambda r: r.random(8).astype(np.float32), lambda c: 0.3 * c**2, random)
    for confidence in (0.3, 0.6, 0.9):
        assert calibration.probability(0, confidence) == pytest.approx(0.3 * confidence**2, abs=0.07)
    assert calibration.probability(1, 0.6) == pytest.approx(0.6)
    assert (np.diff(calibration.curves["level"], axis=1) >= 0).all()


def test_calibration_with_few_samples_stays_near_the_sources_own_word():
    calibration = Calibration(1)
    calibration.observe(0, np.array([0.9], np.float32), np.array([False]))
    calibration.refresh()
    assert 0.4 < calibration.probability(0, 0.9) < 0.9
    assert 0.2 < calibration.probability(0, 0.5) <= 0.5


def test_a_modest_model_is_believed_at_depths_that_were_never_verified_and_other_sources_are_not():
    """Each token of its chains says 0.5 and is right 19 times of 20; only the first three of a chain were verified."""
    calibration = Calibration(2, of_models=[1])
    random = np.random.default_rng(4)
    for curve in (0, 1):
        feed(calibration, curve, 200, lambda r: 0.5 ** np.arange(1, 4), lambda c: 0.95 ** -np.log2(c), random)
    for depth in (6, 10):
        assert calibration.probability(1, 0.5**depth) == pytest.approx(0.95**depth, abs=0.12)
        assert calibration.probability(0, 0.5**depth) <= 4 * 0.5 ** (depth - 1)


def test_calibration_stays_between_zero_and_one_whatever_it_is_fed():
    calibration = Calibration(1)
    random = np.random.default_rng(2)
    feed(calibration, 0, 100, lambda r: np.full(4, 0.05, np.float32), lambda c: np.ones(len(c)), random)
    assert (calibration.curves["level"] >= 0).all()
    assert (calibration.curves["level"] <= 1).all()
    assert calibration.probability(0, 0.05) > 0.8
    assert len(KNOTS) == calibration.curves["level"].shape[1]


def test_a_source_that_was_bad_is_believed_again_after_a_while_without_news():
    random = np.random.default_rng(3)
    calibration = Calibration(1)
    feed(calibration, 0, 200, lambda r: np.full(8, 0.8, np.float32), lambda c: np.zeros(len(c)), random)
    assert calibration.probability(0, 0.8) < 0.03
    for _ in range(3000):
        calibration.end_round()
    assert calibration.probability(0, 0.8) > 0.2


def test_a_curve_without_measurements_rises_gently_from_one_row():
    times = StepTimeCurve().times(1, 64)
    assert (np.diff(times) > 0).all()
    assert times[-1] < 2 * times[0]


def test_a_curve_goes_through_its_measurements_and_between_them_in_straight_lines():
    curve = StepTimeCurve()
    for rows, seconds in ((1, 0.038), (8, 0.047), (32, 0.051), (64, 0.065)):
        for _ in range(5):
            curve.observe(rows, seconds)
    assert curve.seconds(8) == pytest.approx(0.047)
    assert curve.seconds(20) == pytest.approx(0.049)
    assert curve.seconds(128) == pytest.approx(0.065 + 64 * (0.065 - 0.051) / 32)


def test_rows_worth_trying_are_the_end_of_the_next_tier_and_end_with_the_last_one():
    curve = StepTimeCurve()
    assert [curve.next_unsure_rows(rows) for rows in (1, 2, 4, 5, 6, 100_000)] == [2, 3, 6, 6, 8, 1 << 17]
    beyond = [1 << 17, (1 << 17) + 1, 1 << 20]
    assert [curve.next_unsure_rows(rows) for rows in beyond] == beyond


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-4, 10.0)), max_size=60))
def test_a_curve_never_falls_and_is_never_zero(samples):
    curve = StepTimeCurve()
    for rows, seconds in samples:
        curve.observe(rows, seconds)
    times = curve.times(1, 400)
    assert (times > 0).all()
    assert (np.diff(times) >= -1e-12).all()


def test_one_slow_forward_does_not_move_the_curve():
    curve = StepTimeCurve()
    for _ in range(4):
        curve.observe(16, 0.02)
    curve.observe(16, 5.0)
    assert curve.seconds(16) == pytest.approx(0.02)
    curve.observe(48, 5.0)
    curve.observe(48, 0.03)
    assert curve.seconds(48) == pytest.approx(0.03)


def test_one_round_of_many_wrong_nodes_is_enough_to_doubt_their_source():
    calibration = Calibration(1)
    calibration.observe(0, np.full(48, 0.8, np.float32), np.arange(48) < 6)
    calibration.end_round()
    assert calibration.probability(0, 0.8) < 0.25


def test_rounds_slower_than_the_profile_leave_its_slope():
    profile = [(1, 0.05), (4, 0.06), (8, 0.09), (16, 0.15), (32, 0.28)]
    curve = StepTimeCurve(profile)
    for _ in range(5):
        curve.observe(8, 0.18)  # long contexts: slower than the profile says of 16 rows
    assert curve.seconds(8) == pytest.approx(0.18)
    assert curve.seconds(16) == pytest.approx(0.30)
    assert curve.seconds(32) == pytest.approx(0.56)
    assert curve.seconds(4) == pytest.approx(0.12)
    for _ in range(5):
        curve.observe(16, 0.2)
        curve.times(1, 32)  # as each round asks for them
    assert curve.seconds(16) == pytest.approx(0.2)
    assert curve.seconds(32) == pytest.approx(0.2 * 28 / 15)


@pytest.mark.parametrize("slope", [0.0, 0.004])
def test_rounds_larger_than_the_profile_reaches_tell_nothing_of_smaller_ones(slope):
    def forward_s(rows: int) -> float:
        return 0.02 * (1.0 + slope * (rows - 1))

    curve = StepTimeCurve([(rows, forward_s(rows)) for rows in (1, 4, 16, 64)])
    assert curve.seconds(208) > forward_s(208)  # what was never seen is taken to cost something
    for rows in (200, 208, 216) * 4:
        curve.observe(rows, forward_s(rows))
    for rows in (1, 16, 64, 208):
        assert curve.seconds(rows) == pytest.approx(forward_s(rows), rel=0.02)
    for _ in range(6):
        curve.observe(512, 5.0)  # nor slower, however slow larger ones are
    for rows in (1, 16, 64):
        assert curve.seconds(rows) == pytest.approx(forward_s(rows), rel=0.02)


def test_a_slow_forward_or_two_of_a_rare_number_of_rows_do_not_make_it_dear_for_good():
    curve = StepTimeCurve([(1, 0.05), (4, 0.06), (8, 0.09), (16, 0.15)])
    for _ in range(20):
        curve.observe(1, 0.1)
    for rows in (3, 4, 8, 8):
        curve.observe(rows, 5.0)
        curve.times(1, 8)  # as each round asks for them
    expected = [0.1 * (1 + (rows - 1) / 15) for rows in (1, 2, 3, 4)]
    assert curve.times(1, 4) == pytest.approx(expected, rel=0.02)
    assert curve.seconds(8) == pytest.approx(0.18)
    for _ in range(4):
        curve.observe(8, 0.25)  # which is what they take
        curve.times(1, 8)
    assert curve.seconds(8) == pytest.approx(0.25)


def test_prompts_in_a_round_do_not_make_its_drafts_seem_cheap():
    curve = StepTimeCurve([(1, 0.04), (4, 0.04), (8, 0.06), (16, 0.1), (32, 0.18), (256, 1.3)])
    alone, beside = curve.times_of_drafts(4, 4, 9), curve.times_of_drafts(256, 4, 9)
    assert alone.tolist() == curve.times(4, 9).tolist()
    assert beside[0] == alone[0]
    assert np.diff(beside).tolist() == pytest.approx([0.005] * 8)
    # Two measurements that happen to be level must not make a row free.
    flat = StepTimeCurve([(4, 0.04), (256, 1.3), (384, 1.3)])
    assert np.diff(flat.times_of_drafts(256, 4, 9)).tolist() == pytest.approx([0.005] * 8)


@pytest.mark.parametrize(
    ("rows", "seconds"), [(0, 1.0), (-3, 1.0), (4, 0.0), (4, -1.0), (4, float("nan")), (4, float("inf"))]
)
def test_what_cannot_be_a_measurement_is_ignored(rows, seconds):
    curve = StepTimeCurve()
    before = curve.times(1, 8).tolist()
    curve.observe(rows, seconds)
    assert curve.times(1, 8).tolist() == before


@pytest.mark.parametrize("point", [(0, 1.0), (4, 0.0), (4, float("nan"))])
def test_a_profile_that_cannot_be_is_refused(point):
    with pytest.raises(ValueError, match="profile point"):
        StepTimeCurve([point])


def run(wait, rounds, gain, wait_s, num_emitting=1):
    """How many of the rounds asked, when asking gives `gain` more tokens and costs `wait_s`."""
    asked = 0
    for _ in range(rounds):
        asks = wait.pays(num_emitting)
        asked += asks
        wait.observe(num_emitting, asks, 2 + gain * asks, gain * asks, RoundTimes(0.001 + wait_s * asks, 0.04))
    return asked


def test_a_draft_model_that_pays_is_always_asked():
    assert run(DraftWait(), 200, gain=2, wait_s=0.01) == 200


def test_what_is_far_from_paying_is_tried_more_seldom_than_what_nearly_pays():
    nearly, far = DraftWait(), DraftWait()  # waiting costs a third of a round: 2/3 of a token more would pay
    run(nearly, 50, gain=0.8, wait_s=0.021)
    run(far, 50, gain=0.2, wait_s=0.02)
    assert 0 < 3 * run(far, 1000, gain=0.2, wait_s=0.02) < 2 * run(nearly, 1000, gain=0.8, wait_s=0.021)


@pytest.mark.parametrize("catch_up_s", [0.0, 0.5, 5.0])
def test_tries_in_vain_take_a_small_share_of_the_time_however_long_the_context_is(catch_up_s):
    """catch_up_s: that the first round of a try takes longer, because the draft model has not seen the context."""
    wait = DraftWait()
    has_asked, plain_s, waited_s, tries = False, 0.0, 0.0, 0
    for index in range(60_000):
        asks = wait.pays(1)
        tries += asks and not has_asked
        wait_s = 0.02 + catch_up_s * (not has_asked) if asks else 0.0
        wait.observe(1, asks, tokens=2, gained=0, times=RoundTimes(wait_s, 0.04))
        if index >= 8:  # nothing is known before
            plain_s, waited_s = plain_s + 0.04, waited_s + wait_s
        has_asked = asks
    assert tries > 1
    assert waited_s < 0.01 * plain_s


def test_a_draft_model_that_has_become_better_is_asked_again():
    wait = DraftWait()
    run(wait, 300, gain=0, wait_s=0.02)
    run(wait, 3000, gain=3, wait_s=0.01)
    assert run(wait, 200, gain=3, wait_s=0.01) == 200


def test_what_does_not_pay_for_many_sequences_may_pay_for_one():
    wait = DraftWait()
    run(wait, 100, gain=0, wait_s=0.1, num_emitting=16)
    run(wait, 300, gain=2, wait_s=0.01, num_emitting=1)
    assert run(wait, 100, gain=2, wait_s=0.01, num_emitting=1) == 100


@pytest.mark.parametrize("pace", [0.6, 1.3, 2.5])
def test_a_machine_that_others_use_makes_rows_neither_dearer_nor_cheaper_by_the_row(pace):
    """Most forwards have few rows, so that those are measured most at the new pace."""
    curve = StepTimeCurve(row_steps=[4, 8, 12, 16])
    seconds = {4: 0.06, 8: 0.075, 16: 0.105}
    for rows in [4, 4, 8, 4, 16] * 10:
        curve.observe(rows, seconds[rows])
    for rows in [4] * 10:
        curve.observe(rows, pace * seconds[rows])
    assert [curve.seconds(rows) for rows in seconds] == pytest.approx([pace * s for s in seconds.values()], rel=0.02)
    for rows in [4, 4, 8, 4, 16] * 40:  # and what rows cost is still learnt
        curve.observe(rows, pace * seconds[rows] * (2.0 if rows == 16 else 1.0))
    assert curve.seconds(16) / curve.seconds(4) == pytest.approx(3.5, rel=0.05)


def test_rows_that_take_longer_than_more_rows_make_no_others_cheaper():
    """The curve, which rises, lies beside both for good."""
    curve = StepTimeCurve([(rows, 0.01 * rows) for rows in (1, 8, 16, 64)])
    seconds = {12: 0.12, 16: 0.1, 64: 0.4}
    for rows in [12, 16, 64] * 30 + [12, 16, 16, 16, 16] * 4000:
        curve.observe(rows, seconds[rows])
    assert [curve.seconds(rows) for rows in seconds] == pytest.approx([0.11, 0.11, 0.4], rel=0.02)


@pytest.mark.parametrize(("before", "now"), [(17, 24), (9, 12), (24, 17)])
def test_more_rows_within_a_tier_are_no_slower_machine(before, now):
    curve = StepTimeCurve()
    for rows in [4, before, 32, 64] * 20 + [now] * 200:
        curve.observe(rows, 0.01 * rows)
    assert [curve.seconds(rows) for rows in (4, now, 32, 64)] == pytest.approx([0.04, 0.01 * now, 0.32, 0.64], rel=0.05)


@given(st.lists(st.tuples(st.sampled_from([1, 12, 16, 64]), st.floats(1e-9, 1e6)), max_size=60))
def test_all_times_that_can_be_measured_leave_a_curve(measured):
    curve = StepTimeCurve([(1, 0.01), (16, 0.02)])
    for rows, seconds in measured:
        curve.observe(rows, seconds)
    times = curve.times(1, 100)
    assert np.isfinite(times).all()
    assert (times > 0).all()
    assert (np.diff(times) >= 0).all()


def test_a_new_load_is_first_taken_to_be_like_the_nearest_known_one():
    bad, good = DraftWait(), DraftWait()
    run(bad, 50, gain=0, wait_s=0.1, num_emitting=16)
    assert run(bad, 60, gain=0, wait_s=0.1, num_emitting=4) == 0
    run(good, 50, gain=2, wait_s=0.01, num_emitting=4)
    run(good, 50, gain=0, wait_s=0.1, num_emitting=64)
    assert run(good, 20, gain=2, wait_s=0.01, num_emitting=8) == 20


def test_time_rises_in_the_steps_that_a_forward_is_filled_up_to():
    curve = StepTimeCurve([(1, 0.036), (8, 0.042), (16, 0.06), (32, 0.09)], row_steps=[4, 8, 12, 16, 32])
    for seconds, rows in ((0.038, (1, 2, 4)), (0.045, (5, 8)), (0.066, (13,))):
        for count in rows:
            for _ in range(20):
                curve.observe(count, seconds)
    times = curve.times(1, 40)
    for first, last in ((1, 4), (5, 8), (9, 12), (13, 16), (17, 32)):
        assert len(set(times[first - 1 : last].tolist())) == 1, (first, last)
    assert times[:20:4] == pytest.approx([0.038, 0.045, (0.045 + 0.066) / 2, 0.066, times[31]])
    assert (np.diff(times[31:]) > 0).all()  # beyond the last step every row counts
    assert curve.times_of_drafts(3, 3, 3) == pytest.approx([0.038, 0.038, 0.045])
    assert curve.next_unsure_rows(5) == 12  # 8 rows cost what 5 do
    assert curve.next_unsure_rows(16) == 32


@pytest.mark.parametrize("steps", [[0, 4], [4, 4], [8, 4]])
def test_row_steps_that_do_not_ascend_are_refused(steps):
    with pytest.raises(ValueError, match="row_steps"):
        StepTimeCurve(row_steps=steps)


def test_prompts_go_ahead_to_draft_models_as_long_as_waiting_for_them_has_not_been_in_vain():
    wait = DraftWait()
    assert wait.seems_to_pay(1)
    for _ in range(20):
        wait.observe(1, True, tokens=1, gained=0, times=RoundTimes(0.02, 0.03))
    assert not wait.seems_to_pay(1)
    assert not wait.seems_to_pay(2)  # a load that is new is taken to be like the nearest
    waits = [wait.pays(1) for _ in range(3000)].index(True)
    assert waits >= 64
    assert not wait.seems_to_pay(1) or wait.pays(1)  # asking is no try
