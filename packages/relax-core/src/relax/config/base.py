"""What every settings class shares: nothing unknown is accepted, nothing changes after start."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen group of settings; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ConfigError(ValueError):
    """The configuration cannot run. The message names the key, the value and the way out."""
