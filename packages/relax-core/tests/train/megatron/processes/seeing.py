"""Micro-batches that show images and videos, for `problem.py`. Imports nothing of the backend.

Tokens below 10 mark media, the others are text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from relax.backends.train.base import Packed

START, END, IMAGE, VIDEO = 3, 4, 5, 6
PATCH_VALUES = 3 * 2 * 4 * 4
GRIDS = {"small": (1, 2, 2), "wide": (1, 2, 4), "large": (1, 4, 4), "clip": (2, 2, 4)}
# Rows of each micro-batch: prompt tokens, response tokens, what the prompt shows, what a tool shows behind
# two response tokens.
_ROWS = [
    [(5, 4, (), ()), (3, 6, ("large",), ()), (4, 3, ("wide", "clip", "small"), ())],
    [(2, 5, ("clip",), ()), (2, 4, ("clip",), ())],
    [(4, 3, (), ()), (6, 5, (), ())],
    [(3, 3, ("large",), ()), (1, 7, ("large",), ("wide",)), (2, 2, (), ())],
]


def sees(folder: str) -> bool:
    return "vision_config" in json.loads((Path(folder) / "config.json").read_text())


def item(name: str) -> dict[str, Any]:
    """An image or a clip, always the same one of this name."""
    grid = np.asarray([GRIDS[name]], np.int64)
    seed = list(GRIDS).index(name)
    pixels = np.random.default_rng(seed).standard_normal((grid.prod(), PATCH_VALUES)).astype(np.float32)
    if name == "clip":
        return {"kind": "video", "pixel_values_videos": pixels, "video_grid_thw": grid}
    return {"kind": "image", "pixel_values": pixels, "image_grid_thw": grid}


def marked(name: str) -> list[int]:
    """Its tokens; a clip has a time, a token of text, before every frame."""
    time, height, width = GRIDS[name]
    if name == "clip":
        return [
            part
            for frame in range(time)
            for part in (20 + frame, START, *[VIDEO] * (height * width // 4), END)
        ]
    return [START, *[IMAGE] * (height * width // 4), END]


def batches(seed: int, vocabulary: int, count: int = 4) -> list[Packed]:
    """Micro-batches of rows with and without media: several, one of them alone, none, one of them twice."""
    return made_of(_ROWS, item, marked, seed, vocabulary, count)


def pictures_then_text(vocabulary: int) -> list[list[Packed]]:
    """The micro-batches of two steps: two with pictures, then two without."""
    return [[batches(seed, vocabulary)[index] for seed in (31, 32)] for index in (0, 2)]


def made_of(
    shapes: list[list[Any]],
    item: Callable[[str], dict[str, Any]],
    marked: Callable[[str], list[int]],
    seed: int,
    vocabulary: int,
    count: int,
) -> list[Packed]:
    """Micro-batches of such rows (see `_ROWS`), in turn."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for rows in (shapes[index % len(shapes)] for index in range(count)):
        tokens, lengths, prompts, masks, media = [], [], [], [], []
        for prompt, response, shown, tool in rows:
            text = torch.randint(10, vocabulary, (prompt + response,), generator=generator).tolist()
            mask = (torch.rand(response, generator=generator) < 0.8).tolist()
            begin = [text[0], *[part for name in shown for part in marked(name)], *text[1:prompt]]
            said = text[prompt:]
            if tool:
                between = [part for name in tool for part in marked(name)]
                said = [*said[:2], *between, *said[2:]]
                mask = [*mask[:2], *[False] * len(between), *mask[2:]]
            tokens += [*begin, *said]
            lengths.append(len(begin) + len(said))
            prompts.append(len(begin))
            masks += mask
            media.append([item(name) for name in (*shown, *tool)])
        made.append(
            Packed(
                torch.tensor(tokens),
                torch.tensor([0, *lengths]).cumsum(0),
                torch.tensor(prompts),
                {
                    "loss_mask": torch.tensor(masks).to(torch.uint8),
                    "rollout_logprobs": -4 * torch.rand(len(masks), generator=generator),
                    "advantages": torch.randn(len(masks), generator=generator),
                },
                media=media,
            )
        )
    return made


def arguments(tokens: torch.Tensor, media: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """What transformers' own forward is given for a row int64 [tokens]."""
    found: dict[str, list[torch.Tensor]] = {}
    for one in media:
        for name, array in one.items():
            if name != "kind":
                found.setdefault(name, []).append(torch.as_tensor(array))
    if not found:
        return {}
    kinds = (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()
    return {name: torch.cat(parts) for name, parts in found.items()} | {"mm_token_type_ids": kinds[None]}


def write_config(kind: str, text: dict[str, Any], tied: bool, deepstack: list[int]) -> dict[str, Any]:
    """A tiny config of Qwen3-VL around a text config."""
    text = {name: value for name, value in text.items() if name != "tie_word_embeddings"}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "tie_word_embeddings": tied,
        "text_config": {
            **text,
            "model_type": f"{kind}_text",
            "rope_parameters": rope,
            "tie_word_embeddings": tied,
        },
        "vision_config": {
            "model_type": f"{kind}_vision",
            "deepstack_visual_indexes": deepstack,
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "num_position_embeddings": 16,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }
