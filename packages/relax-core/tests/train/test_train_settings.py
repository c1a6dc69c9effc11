"""Settings are checked, and the learning rate is a function of the step."""

import math

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from relax.backends.train.errors import SettingsError
from relax.backends.train.settings import TrainerSettings, learning_rate


def rates(steps: int, **settings) -> list[float]:
    return [learning_rate(TrainerSettings(lr=1.0, **settings), step) for step in range(steps)]


def test_a_constant_schedule_rises_and_stays():
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(2) == [1.0, 1.0]


def test_a_linear_schedule_ends_at_zero_after_its_last_step():
    assert rates(8, lr_schedule="linear", warmup_steps=2, total_steps=6) == [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]


def test_a_cosine_schedule_is_half_a_cosine():
    expected = [0.5, 1.0] + [0.5 * (1 + math.cos(math.pi * done / 4)) for done in range(5)] + [0.0]
    assert rates(8, lr_schedule="cosine", warmup_steps=2, total_steps=6) == pytest.approx(expected, abs=1e-15)


@hypothesis_settings(deadline=None)  # a loaded machine is no finding
@given(
    st.sampled_from(["linear", "cosine"]),
    st.integers(0, 20),
    st.integers(1, 50),
    st.integers(0, 100),
    st.floats(0, 1),
)
def test_a_falling_schedule_never_leaves_its_bounds(schedule, warmup, after, step, lr):
    settings = TrainerSettings(lr=lr, lr_schedule=schedule, warmup_steps=warmup, total_steps=warmup + after)
    now, later = learning_rate(settings, step), learning_rate(settings, step + 1)
    assert 0 <= now <= lr
    assert later <= now or step < warmup


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\)"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm is 0.0.*None to never clip"),
        ({"lr_schedule": "cosin"}, "lr_schedule is 'cosin'; it has to be constant, linear or cosine"),
        ({"lr_schedule": "linear"}, "total_steps is None"),
        (
            {"lr_schedule": "linear", "warmup_steps": 5, "total_steps": 5},
            r"total_steps is 5.*warmup_steps \(5\)",
        ),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"temperature": 0.0}, "temperature is 0.0.*greedy"),
    ],
)
def test_a_setting_out_of_its_range_is_named(settings, message):
    with pytest.raises(SettingsError, match=message):
        TrainerSettings(**({"lr": 1e-3} | settings))
