"""Parts of a model that can be left as they are while the others train."""

from typing import Annotated, Literal

from pydantic import AfterValidator

Part = Literal["language", "vision", "audio", "projector"]
"""`language`: embeddings, decoder and output layer. `vision`, `audio`: a tower without its projector.
`projector`: what brings the towers' outputs to the width of the language model (Qwen3-VL's mergers).
"""

PARTS: tuple[Part, ...] = ("language", "vision", "audio", "projector")


def _each_once(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    twice = sorted({part for part in parts if parts.count(part) > 1})
    if twice:
        raise ValueError(f"freeze names {', '.join(twice)} twice; name each part once")
    return parts


Frozen = Annotated[tuple[Part, ...], AfterValidator(_each_once)]
"""Parts to freeze."""
