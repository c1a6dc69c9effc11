"""What is only there when an extra of this package is installed."""

from importlib import import_module
from types import ModuleType

from dcs.errors import DcsError


class MissingExtra(DcsError, ImportError):
    """A library that an extra of this package brings is not installed. Attribute: `extra`."""

    code = "missing_extra"

    def __init__(self, message: str, extra: str) -> None:
        super().__init__(message)
        self.extra = extra


def load(module: str, extra: str) -> ModuleType:
    """The module of this folder called `module`, which needs the libraries of `extra`.

    Raises:
        MissingExtra: they are not installed.
    """
    try:
        return import_module(f"dcs.introspection.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "dcs":
            raise
        raise MissingExtra(
            f"{error.name} is not installed; pip install 'relax-dcs[{extra}]'", extra
        ) from error
