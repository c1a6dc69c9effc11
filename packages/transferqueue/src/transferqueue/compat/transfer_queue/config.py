"""The configuration that `init` takes and returns: nested mappings whose entries are attributes too."""

from collections.abc import Mapping
from typing import Any

from .errors import InvalidRequest

_DEFAULTS: dict[str, Any] = {
    "address": None,
    "token": None,
    "metrics": {"enabled": False, "port": 0},
    "controller": {"sampler": "SequentialSampler", "polling_mode": False, "settle": "next", "zmq_info": None},
    "backend": {
        "storage_backend": "SimpleStorage",
        "SimpleStorage": {
            "total_storage_size": None,
            "num_data_storage_units": 2,
            "max_bytes": None,
            "host": "127.0.0.1",
        },
    },
}


class Config(dict[str, Any]):
    """A mapping whose entries are attributes too: ``config.controller.polling_mode``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration has no {name!r}; it has {sorted(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Config":
        """A copy, nested mappings too."""
        return cls(
            {str(key): cls.of(given[key]) if isinstance(given[key], Mapping) else given[key] for key in given}
        )


def merged(given: Mapping[str, Any] | None) -> Config:
    """The defaults, with what is given in their place; entries that mean nothing here are kept.

    Raises:
        InvalidRequest: a section is not a mapping, or a value cannot be.
    """
    config = _over(Config.of(_DEFAULTS), given or {}, "")
    settle = config.controller.settle
    if settle not in ("next", "ack"):
        raise InvalidRequest(f'controller.settle is {settle!r}; it must be "next" or "ack"')
    backend = config.backend.storage_backend
    if backend != "SimpleStorage":
        raise InvalidRequest(
            f"backend.storage_backend is {backend!r}; this store is its own backend, leave it at "
            "'SimpleStorage'"
        )
    return config


def _over(config: Config, given: Mapping[str, Any], path: str) -> Config:
    for key in given:
        value, name = given[key], f"{path}{key}"
        mine = config.get(key)
        if isinstance(mine, Config):
            if not isinstance(value, Mapping):
                raise InvalidRequest(f"{name} is {value!r}; it must be a mapping of settings")
            _over(mine, value, name + ".")
        else:
            config[str(key)] = Config.of(value) if isinstance(value, Mapping) else value
    return config


def addressed(info: str | Mapping[str, Any]) -> tuple[str, str | None]:
    """Address and token of a catalog, from an address, or a mapping that has both."""
    if isinstance(info, str):
        return info, None
    if not isinstance(info, Mapping) or not info.get("address"):
        raise InvalidRequest(f"{info!r} says no address; give the controller.zmq_info that init() returned")
    return str(info["address"]), info.get("token")
