"""Typed configuration of a run: one tree of frozen settings, read from YAML, environment and command line."""

from relax.config.base import ConfigError
from relax.config.checks import check
from relax.config.load import dump, load, resolve
from relax.config.run import RunConfig

__all__ = ["ConfigError", "RunConfig", "check", "dump", "load", "resolve"]
