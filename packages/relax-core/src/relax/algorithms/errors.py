"""What goes wrong in an algorithm: an unknown name or setting, or input it must not train on."""


class AlgorithmError(ValueError):
    """The message names the thing, its value, what was expected, and the way out."""
