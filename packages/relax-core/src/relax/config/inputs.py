"""What goes into a run: the model, the prompts, the environment and the reward."""

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from relax.config.base import Settings


class ModelSettings(Settings):
    """The policy. `model=PATH_OR_HUB_ID` is short for `model.path=...`."""

    path: str = "tiny"
    """`tiny`, `tiny_moe`, `tiny_vl` or `tiny_omni` (made on the spot, random weights), a local Hugging Face
    folder, or a hub id.
    """
    revision: str | None = None
    """Hub revision; only for a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    context_length: int | None = Field(default=None, ge=8)
    """Tokens of prompt and response together; the model's own limit when not given."""
    text_only: bool = False
    """Take a model that sees or hears for what it reads: its encoders are kept as they are, and no picture or
    sound is shown to it.
    """
    tiny: dict[str, PositiveInt] = Field(default_factory=dict)
    """Dimensions of the tiny model, as in its config.json: hidden_size, num_hidden_layers, ..."""

    @property
    def family(self) -> str | None:
        """What `omni_processor` is told of the model's family; None to find out."""
        return "text" if self.text_only else None


class DataSettings(Settings):
    """The prompts. `data=PATH` is short for `data.path=...`."""

    path: str = ""
    """JSONL, JSON, CSV or Parquet file, `datasets` folder or hub name, or `module:function` giving rows."""
    split: str = "train"
    prompt_column: str = "prompt"
    """Column with the prompt as text; not read when `messages_column` is given."""
    messages_column: str | None = None
    """Column with the prompt as chat messages, each {"role", "content"}."""
    answer_column: str | None = None
    """Column with the reference answer, given to the reward and the environment."""
    image_column: str | None = None
    """Column with an image or a list of them; they replace the prompt's `<image>` placeholders in order. What
    has no placeholder comes before the last message's text; a row without media holds null or an empty list.
    """
    audio_column: str | None = None
    """The same of sounds, for `<audio>`: paths, bytes or arrays with their sampling rate."""
    video_column: str | None = None
    """The same of videos, for `<video>`: paths or bytes."""
    audio_in_video: bool = False
    """Videos come with their own sound, for models that hear; every video then needs a sound track."""
    system_prompt: str | None = None
    shuffle: bool = True
    """Order the rows anew in each epoch, by the run's seed."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first rows."""

    @property
    def media_columns(self) -> dict[str, str]:
        """Kind of media (image, video, audio) -> its column, for those that are given."""
        columns = {"image": self.image_column, "video": self.video_column, "audio": self.audio_column}
        return {kind: column for kind, column in columns.items() if column}


class FactorySettings(Settings):
    """A registered name, or `module:attribute`, with its keyword arguments. A string is short for `name`."""

    name: str
    kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value
