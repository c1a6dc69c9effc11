"""For every test: what holds where tests run side by side (`pytest -n`)."""

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Workers ignore Ctrl-C, and what they start would inherit that; tests send it to theirs."""
    if hasattr(config, "workerinput"):
        signal.signal(signal.SIGINT, signal.default_int_handler)
