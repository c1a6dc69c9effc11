"""What a Qwen3-Omni thinker is shown, images, video and sound: from a batch's media to where they stand.

    items.py      the arrays of media items, named as transformers' processor names them
    placing.py    which tokens of a row an item stands at, and the three rotary positions of every token
    towers.py     each different picture and sound through transformers' towers once
    hidden.py     `hidden_states`, the forward pass up to the last hidden state

Nothing here knows a backend; `items` and `placing` know no model either.
"""

from relax.backends.train.omni.hidden import MODEL_TYPE, hidden_states
from relax.backends.train.omni.placing import Reading, require

__all__ = ["MODEL_TYPE", "Reading", "hidden_states", "require"]
