"""StepTimeModel: calibration, following, and no spiral to tiny steps."""

from __future__ import annotations

import pytest

from shared.step_time import StepTimeModel


def calibrated() -> StepTimeModel:
    model = StepTimeModel()
    model.calibrate((16, 0.056), (128, 0.168))
    return model


def test_before_calibration_it_knows_nothing() -> None:
    model = StepTimeModel()
    model.record(100, 1.0)
    assert (model.tokens_within(0.2), model.tokens_per_s) == (None, 0.0)


def test_two_steps_give_the_fixed_and_the_per_token_part() -> None:
    model = calibrated()
    assert model.predict_s(160) == pytest.approx(0.2)
    assert model.tokens_within(0.2) in (159, 160)


def test_small_steps_do_not_make_the_machine_look_slow() -> None:
    model = calibrated()
    for _ in range(100):
        model.record(16, 0.056)
    assert model.tokens_within(0.2) in (159, 160)


def test_it_follows_a_slower_machine_and_forgets_it_again() -> None:
    model = calibrated()
    for _ in range(20):
        model.record(160, 0.6)
    assert model.slowdown == pytest.approx(3.0, rel=0.01)
    for _ in range(20):
        model.record(64, 0.104)
    assert model.slowdown == pytest.approx(1.0, rel=0.01)


def test_one_stalled_step_moves_it_by_a_bounded_amount() -> None:
    model = calibrated()
    model.record(160, 60.0)
    assert model.slowdown <= 2.0


def test_noise_cannot_make_tokens_free() -> None:
    model = StepTimeModel()
    model.calibrate((16, 0.05), (128, 0.04))
    assert model.per_token_s > 0 and model.fixed_s >= 0
