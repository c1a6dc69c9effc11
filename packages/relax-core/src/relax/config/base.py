"""What every settings class shares: nothing unknown is accepted, nothing changes after start."""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Settings(BaseModel):
    """A frozen group of settings; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields.get(info.field_name or "")
        if isinstance(value, bool) and field is not None and not _takes_truth(field.annotation):
            raise ValueError("true and false are no value of it")
        return value


class ConfigError(ValueError):
    """The configuration cannot run. The message names the key, the value and the way out."""


def _takes_truth(kind: Any) -> bool:
    return kind in (bool, Any) or any(_takes_truth(part) for part in get_args(kind))
