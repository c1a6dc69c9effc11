"""Sound to log-mel features as Whisper takes them, equal to transformers' WhisperFeatureExtractor.

Each sound is heard for itself, as long as it is: without padding, so that what it becomes does not depend on
what else a conversation holds ("Robust Speech Recognition via Large-Scale Weak Supervision", Radford et al.,
2022, section 2.2; the scale is that of its published code).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from omni_processor.errors import ConfigError, Empty

_CHUNK_TOKENS = 13  # that transformers writes for a whole chunk, whatever its length


@dataclass(frozen=True, slots=True)
class MelRules:
    """How samples become features.

    Attributes:
        rate: samples a second that the model hears.
        bins: mel bins (feature_size).
        window: samples in a window (n_fft).
        hop: samples from one window to the next.
        half_chunk: mel frames in half of what the model's convolutions see at once (n_window).
    """

    rate: int = 16_000
    bins: int = 128
    window: int = 400
    hop: int = 160
    half_chunk: int = 50

    def tokens(self, frames: int) -> int:
        """Placeholder tokens that a sound of so many mel frames takes: three convolutions of stride 2."""
        chunks, rest = divmod(frames, 2 * self.half_chunk)
        for _ in range(3):
            rest = (rest - 1) // 2 + 1
        return _CHUNK_TOKENS * chunks + rest

    def frames(self, samples: int) -> int:
        """Mel frames of so many samples at `rate`."""
        return samples // self.hop


def log_mel(samples: np.ndarray, rules: MelRules, item: str = "audio") -> np.ndarray:
    """Mono float32 [samples] to float32 [bins, frames], between about -1 and 1.

    Raises:
        Empty: less than a window's half, or than a hop, of sound.
    """
    import torch

    if len(samples) <= rules.window // 2 or len(samples) < rules.hop:
        raise Empty(
            f"the sound lasts {len(samples) / rules.rate * 1e3:.1f} ms; the model hears nothing in less than "
            f"{(rules.window // 2 + 1) / rules.rate * 1e3:.1f} ms",
            item=item,
        )
    spectrum = torch.stft(
        torch.from_numpy(np.ascontiguousarray(samples)),
        rules.window,
        rules.hop,
        window=torch.hann_window(rules.window),
        return_complex=True,
    )
    power = (spectrum[:, :-1].abs() ** 2).contiguous()  # the last window reaches over the end
    logarithm = (_filters(rules) @ power).clamp(min=1e-10).log10()
    logarithm = torch.maximum(logarithm, logarithm.max() - 8.0)
    return ((logarithm + 4.0) / 4.0).numpy()


@lru_cache(maxsize=8)
def _filters(rules: MelRules) -> Any:
    import torch
    from transformers.audio_utils import mel_filter_bank

    bank = mel_filter_bank(
        num_frequency_bins=1 + rules.window // 2,
        num_mel_filters=rules.bins,
        min_frequency=0.0,
        max_frequency=8000.0,
        sampling_rate=rules.rate,
        norm="slaney",
        mel_scale="slaney",
    )
    return torch.from_numpy(bank).to(torch.float32).T.contiguous()


def read_mel_rules(preprocessor: Mapping[str, Any], audio: Mapping[str, Any]) -> MelRules:
    """The rules that a preprocessor config and config.json's audio_config give together.

    Raises:
        ConfigError: they contradict each other, or ask for noise (dither), which would make no two results
            alike.
    """
    if preprocessor.get("dither"):
        raise ConfigError(
            f"dither is {preprocessor['dither']} in the preprocessor config; sound is taken as "
            "it is: set it to 0"
        )
    rules = MelRules(
        rate=int(preprocessor.get("sampling_rate") or MelRules().rate),
        bins=int(preprocessor.get("feature_size") or audio.get("num_mel_bins") or MelRules().bins),
        window=int(preprocessor.get("n_fft") or MelRules().window),
        hop=int(preprocessor.get("hop_length") or MelRules().hop),
        half_chunk=int(audio.get("n_window") or MelRules().half_chunk),
    )
    if audio.get("num_mel_bins", rules.bins) != rules.bins:
        raise ConfigError(
            f"feature_size is {rules.bins} in the preprocessor config but {audio['num_mel_bins']} in "
            "config.json's audio_config.num_mel_bins: they must agree"
        )
    return rules
