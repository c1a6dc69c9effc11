"""Environments that come with the package, and how to find one by name.

A new one is one module with a class of the `Environment` protocol, and one line in `registry.py`; one of your
own needs no line: it is found by its import path.
"""

from .calculator import Calculator
from .registry import environment_factory
from .single_turn import SingleTurn

__all__ = ["Calculator", "SingleTurn", "environment_factory"]
