"""What is only there when an extra of this package is installed."""

from importlib import import_module
from types import ModuleType

from ..errors import QueueError


class MissingExtra(QueueError, ImportError):
    """A library that an extra of this package brings is not installed. Detail: ``extra``."""


def load(module: str, extra: str) -> ModuleType:
    """The module of this folder called `module`, which needs the libraries of `extra`.

    Raises:
        MissingExtra: they are not installed.
    """
    try:
        return import_module(f".{module}", __package__)
    except ModuleNotFoundError as error:
        package = __package__ or ""
        if error.name is None or error.name.partition(".")[0] == package.partition(".")[0]:
            raise
        raise MissingExtra(
            f"{error.name} is not installed; pip install 'relax-transferqueue[{extra}]'", extra=extra
        ) from error
