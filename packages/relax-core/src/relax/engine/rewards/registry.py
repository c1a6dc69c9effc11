"""Rewards by name, or by import path for one of your own."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from relax.engine.rewards.base import Reward, RewardError, RewardInput, Score
from relax.engine.rewards.mixture import Mixture
from relax.registry import Registry, nearest

REWARDS = Registry(
    "reward",
    {
        "char_share": "relax.engine.rewards.char_share:CharShare",
        "exact_match": "relax.engine.rewards.exact_match:ExactMatch",
        "math": "relax.engine.rewards.math:MathReward",
        "mixture": "relax.engine.rewards.registry:build_mixture",
    },
    RewardError,
)
"""Name -> what makes the reward from its settings."""


class FunctionReward:
    """An async function (sample, **settings) -> Score | float, as a reward under the function's name."""

    def __init__(
        self, function: Callable[..., Awaitable[Score | float]], settings: Mapping[str, Any]
    ) -> None:
        self.name = getattr(function, "__name__", "function")
        self._function = function
        self._settings = dict(settings)

    async def __call__(self, sample: RewardInput) -> Score:
        found = await self._function(sample, **self._settings)
        return found if isinstance(found, Score) else Score(float(found))


def names() -> list[str]:
    """The registered names."""
    return list(REWARDS.entries)


def build(name: str, settings: Mapping[str, Any] | None = None) -> Reward:
    """Make a reward. Close it with `relax.engine.rewards.close`.

    Args:
        name: a registered name, or "module:attribute" of either an async function (sample, **settings) ->
            Score or float, or a class or function that makes a `Reward` from the settings.
        settings: keyword arguments.

    Raises:
        RewardError: unknown name or setting (naming the nearest), a missing setting, a value that does not
            fit, or an import path that cannot be imported or makes no reward.
    """
    given = dict(settings or {})
    make = REWARDS.load(name)
    if inspect.iscoroutinefunction(make):
        _check_settings(name, make, given, skip=1)
        return FunctionReward(make, given)
    if not callable(make):
        raise RewardError(
            f"reward {name!r} is a {type(make).__name__}: expected an async function or a class"
        )
    _check_settings(name, make, given, skip=0)
    if name in REWARDS.entries:
        given = _convert(name, make, given)
    reward: Any = make(**given)
    if not inspect.iscoroutinefunction(type(reward).__call__) or not isinstance(
        getattr(reward, "name", None), str
    ):
        raise RewardError(
            f"reward {name!r} made a {type(reward).__name__}: expected an object with a `name` and "
            "`async def __call__(self, sample) -> Score`"
        )
    return reward


def build_mixture(rewards: Sequence[Mapping[str, Any]]) -> Mixture:
    """A mixture from plain data: items of `reward` (a name), `weight`, and `settings` if it takes any."""
    built = []
    for item in rewards:
        for key in item:
            if key not in ("reward", "weight", "settings"):
                raise RewardError(
                    f"mixture: {key!r} in {dict(item)}{nearest(key, ('reward', 'weight', 'settings'))}: "
                    "expected reward, weight and settings"
                )
        if not isinstance(item.get("reward"), str) or not isinstance(item.get("weight"), int | float):
            raise RewardError(f"mixture: {dict(item)}: expected a `reward` by name and a number as `weight`")
        built.append((float(item["weight"]), build(item["reward"], item.get("settings"))))
    return Mixture(built)


def _check_settings(name: str, make: Callable[..., Any], given: Mapping[str, Any], *, skip: int) -> None:
    parameters = list(inspect.signature(make).parameters.values())[skip:]
    known = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    if len(known) == len(parameters):
        for key in given:
            if key not in known:
                raise RewardError(
                    f"reward {name!r} has no setting {key!r}{nearest(key, known)}: expected any of "
                    f"{', '.join(known) or 'none'}"
                )
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.default is parameter.empty and parameter.name not in given:
            raise RewardError(f"reward {name!r} needs the setting {parameter.name!r}: give it a value")


def _convert(name: str, make: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    types = get_type_hints(make.__init__ if inspect.isclass(make) else make)
    converted = {}
    for key, value in given.items():
        try:
            converted[key] = msgspec.convert(value, types[key])
        except msgspec.ValidationError as error:
            raise RewardError(f"reward {name!r}: {key}={value!r}: {error}") from error
    return converted
