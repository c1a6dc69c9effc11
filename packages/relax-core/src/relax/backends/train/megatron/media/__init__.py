"""Media in front of the language model: what a batch shows, the encoders that see or hear it, and the merge.

Every rank reads what a micro-batch shows (`inputs.Media`, by a family's `MediaSpec.read`). Ranks of the first
pipeline stage have the encoders, which are Hugging Face's own modules, share the items among themselves
(`sharing.py`), and put the rows they become in the places of their own tokens (`model.py`).
"""

from relax.backends.train.megatron.media.encoder import Encoder, EncoderSpec, MediaSpec
from relax.backends.train.megatron.media.inputs import Item, Media, OwnMedia, Stream, own
from relax.backends.train.megatron.media.model import DeepstackLayer, MediaModel

__all__ = [
    "DeepstackLayer",
    "Encoder",
    "EncoderSpec",
    "Item",
    "Media",
    "MediaModel",
    "MediaSpec",
    "OwnMedia",
    "Stream",
    "own",
]
