"""The fields that travel on the bus: each named once, with its type, shape, writer and readers.

Shapes speak of one sample: `prompt` and `response` are its lengths in tokens. On the bus every field is
ragged, one row a sample. The bus gives each sample its id; there is no second one.
"""

from dataclasses import dataclass

PARTITION = "train"
"""The partition of the bus that holds training samples."""

MEDIA_PREFIX = "media/"
"""Tensors of a modality travel as one field each; None for a sample without it."""

MEDIA_ORDER = MEDIA_PREFIX + "order"
"""uint8 [items]: of what kind each is, in the order of their placeholders; see relax.distributed.media."""

MEDIA_FIELDS = (
    MEDIA_ORDER,
    MEDIA_PREFIX + "pixel_values",
    MEDIA_PREFIX + "image_grid_thw",
    MEDIA_PREFIX + "pixel_values_videos",
    MEDIA_PREFIX + "video_grid_thw",
    MEDIA_PREFIX + "video_second_per_grid",
    MEDIA_PREFIX + "input_features",
    MEDIA_PREFIX + "audio_feature_lengths",
)
"""What a sample shows, the arrays of its items joined: float32 [patches, patch values] and int64 [n, 3]
(time, height, width in patches) of images and of videos, float32 [n] seconds of a video's step in time,
float32 [mel frames, mel bins] of all sounds end to end and int64 [n] frames of each.
"""


@dataclass(frozen=True)
class Field:
    """One column of the bus."""

    name: str
    dtype: str
    shape: str
    writer: str
    about: str


ROUTES = "routed_experts"
"""The experts that each token was sent to when it was sampled; only with actor.routing_replay."""

FIELDS: dict[str, Field] = {
    field.name: field
    for field in (
        Field("prompt_key", "str", "()", "rollout", "name of the prompt, stable over epochs"),
        Field("group", "str", "()", "rollout", "the group's key: the n samples of one start of one prompt"),
        Field(
            "ordinal",
            "int64",
            "()",
            "rollout",
            "place of the group in the order taken from the prompt source",
        ),
        Field("member", "int32", "()", "rollout", "place of the sample in its group, 0 to n-1"),
        Field("prompt_length", "int32", "()", "rollout", "tokens before the first response token"),
        Field(
            "tokens", "int32", "(prompt+response,)", "rollout", "exactly the ids the engine saw and sampled"
        ),
        Field(
            "loss_mask",
            "uint8",
            "(response,)",
            "rollout",
            "1 = sampled by the policy, 0 = observation or template",
        ),
        Field(
            "rollout_logprobs", "float32", "(response,)", "rollout", "of the engine; 0 where the mask is 0"
        ),
        Field(
            ROUTES,
            "uint8 | int16 | int32",
            "(prompt+response-1, layers, top_k)",
            "rollout",
            "experts of every token but the last; see relax.backends.routes",
        ),
        Field("policy_versions", "int32", "(spans,3)", "rollout", "(version, start, end) over the response"),
        Field("reward", "float32", "()", "rollout", "the episode's reward"),
        Field("reward_parts", "data", "()", "rollout", "named parts of the reward, plain data"),
        Field("truncated", "uint8", "()", "rollout", "1 = ended by a limit, not by itself"),
        Field("turns", "int32", "()", "rollout", "turns the policy took"),
        Field("reference_logprobs", "float32", "(response,)", "reference", "under the reference policy"),
        Field("advantages", "float32", "(response,)", "advantages", "0 where the mask is 0"),
    )
}

TASK_ADVANTAGES = "advantages"
TASK_REFERENCE = "reference"
TASK_ACTOR = "actor"


def tasks(*, reference: bool, media: bool, routes: bool = False) -> dict[str, list[str]]:
    """The consumer tasks of the training partition, and the fields each needs of a sample and reads.

    Args:
        reference: a Reference role scores the samples.
        routes: samples have routes, which the actor replays and nobody else reads.
        media: the model sees or hears: every put writes the media fields, None for a sample without.
    """
    shown = list(MEDIA_FIELDS) if media else []
    actor = [
        *("tokens", "prompt_length", "loss_mask", "rollout_logprobs", "policy_versions", "advantages"),
        *("ordinal", "member", "reward", "reward_parts", "truncated", "turns"),
    ]
    if routes:
        actor.append(ROUTES)
    found = {TASK_ADVANTAGES: ["reward", "loss_mask", "ordinal"]}
    if reference:
        found[TASK_REFERENCE] = ["tokens", "prompt_length", "loss_mask", "ordinal", "member", *shown]
        actor.append("reference_logprobs")
    return {**found, TASK_ACTOR: actor + shown}
