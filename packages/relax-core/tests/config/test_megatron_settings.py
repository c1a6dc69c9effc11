"""Settings of the megatron backend: what is passed through, and what is refused by name."""

import pytest
from pydantic import ValidationError
from relax.config.megatron import OWNED, MegatronSettings, transformer_config_fields


def test_a_field_of_megatron_goes_through() -> None:
    settings = MegatronSettings(transformer_config={"moe_router_dtype": "fp32"})
    assert settings.transformer_config == {"moe_router_dtype": "fp32"}


def test_a_field_that_we_own_is_refused_with_what_to_set_instead() -> None:
    with pytest.raises(ValidationError, match=r"set actor\.megatron\.recompute instead"):
        MegatronSettings(transformer_config={"recompute_granularity": "full"})
    with pytest.raises(ValidationError, match="hidden_size is not passed through"):
        MegatronSettings(transformer_config={"hidden_size": 5})


def test_fields_are_read_from_the_source_and_near_misses_are_named() -> None:
    known = transformer_config_fields()
    if not known:
        pytest.skip("megatron-core is not installed (relax-core[megatron])")
    assert {"num_layers", "tensor_model_parallel_size", "moe_router_dtype"} <= known
    assert OWNED.keys() <= known
    with pytest.raises(ValidationError, match="did you mean moe_router_dtype"):
        MegatronSettings(transformer_config={"moe_router_dtyp": "fp32"})


def test_layers_are_recomputed_together_only_when_they_are_recomputed_whole() -> None:
    with pytest.raises(ValidationError, match="recompute=full"):
        MegatronSettings(recompute="selective", recompute_layers=2)
