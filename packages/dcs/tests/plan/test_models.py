"""Layouts of Megatron ranks and of engines: contents against conversions written out, and resharding."""

import itertools

import numpy as np
import pytest
from dcs.layout import Layout, MegatronShape, TensorSpec, huggingface_layout, megatron_layout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

steady = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

DENSE = MegatronShape(
    layers=2, hidden=6, ffn=8, heads=4, kv_groups=2, head_dim=3, vocab=11, qk_layernorm=True
)
BIASED = MegatronShape(
    layers=2, hidden=4, ffn=8, heads=8, kv_groups=4, head_dim=2, vocab=9, qkv_bias=True, tied_embeddings=True
)
MIXTURE = MegatronShape(
    layers=3,
    hidden=4,
    ffn=8,
    heads=4,
    kv_groups=4,
    head_dim=2,
    vocab=16,
    experts=4,
    moe_ffn=4,
    shared_ffn=8,
    shared_gate=True,
    dense_layers=(0,),
)
SHAPES = {"dense": DENSE, "biased": BIASED, "mixture": MIXTURE}


@pytest.fixture(params=SHAPES)
def shape(request) -> MegatronShape:
    return SHAPES[request.param]


def filled(oracle, shape: MegatronShape):
    shapes = shape.tensors()
    return oracle(shapes, dict.fromkeys(shapes, "uint16"))


def agree(layout: Layout, made, expected: dict[str, np.ndarray]) -> None:
    """The same names, and the same values wherever a piece covers them; rows behind those of `expected` are
    padding.
    """
    assert [spec.name for spec in layout.tensors] == sorted(expected)
    for spec in layout.tensors:
        value, covered = made.own(spec)
        wanted = expected[spec.name]
        assert spec.shape[1:] == wanted.shape[1:], spec.name
        assert np.array_equal(value[: len(wanted)], wanted), spec.name
        assert covered[: len(wanted)].all(), spec.name
        assert not covered[len(wanted) :].any(), spec.name


def megatron(shape: MegatronShape, hf: dict[str, np.ndarray], rank: int, size: int) -> dict[str, np.ndarray]:
    """The parameters of one tensor-parallel rank (Transformer Engine spec, grouped experts, one stage)."""
    padded = -(-shape.vocab // (2 * size)) * 2 * size

    def rows(array: np.ndarray) -> np.ndarray:
        return np.split(array, size)[rank]

    def columns(array: np.ndarray) -> np.ndarray:
        return np.split(array, size, axis=1)[rank]

    def vocabulary(array: np.ndarray) -> np.ndarray:
        return array[padded // size * rank : padded // size * (rank + 1)]

    def qkv(prefix: str, end: str) -> np.ndarray:
        q, k, v = (hf[f"{prefix}self_attn.{name}_proj.{end}"] for name in "qkv")
        grouped = [array.reshape(shape.kv_groups, -1, *array.shape[1:]) for array in (q, k, v)]
        fused = np.concatenate(grouped, axis=1)
        return rows(fused.reshape(-1, *q.shape[1:]))

    def fc1(prefix: str) -> np.ndarray:
        return np.concatenate([rows(hf[prefix + "gate_proj.weight"]), rows(hf[prefix + "up_proj.weight"])])

    found = {
        "embedding.word_embeddings.weight": vocabulary(hf["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if not shape.tied_embeddings:
        found["output_layer.weight"] = vocabulary(hf["lm_head.weight"])
    for layer in range(shape.layers):
        own, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        found[own + "self_attention.linear_qkv.layer_norm_weight"] = hf[theirs + "input_layernorm.weight"]
        found[own + "self_attention.linear_qkv.weight"] = qkv(theirs, "weight")
        if shape.qkv_bias:
            found[own + "self_attention.linear_qkv.bias"] = qkv(theirs, "bias")
        found[own + "self_attention.linear_proj.weight"] = columns(hf[theirs + "self_attn.o_proj.weight"])
        if shape.qk_layernorm:
            for name in "qk":
                found[f"{own}self_attention.{name}_layernorm.weight"] = hf[
                    f"{theirs}self_attn.{name}_norm.weight"
                ]
        norm = hf[theirs + "post_attention_layernorm.weight"]
        own, theirs = own + "mlp.", theirs + "mlp."
        if not shape.is_moe(layer):
            found[own + "linear_fc1.layer_norm_weight"] = norm
            found[own + "linear_fc1.weight"] = fc1(theirs)
            found[own + "linear_fc2.weight"] = columns(hf[theirs + "down_proj.weight"])
            continue
        found[own.removesuffix("mlp.") + "pre_mlp_layernorm.weight"] = norm
        found[own + "router.weight"] = hf[theirs + "gate.weight"]
        for expert in range(shape.experts):
            found[f"{own}experts.linear_fc1.weight{expert}"] = fc1(f"{theirs}experts.{expert}.")
            down = hf[f"{theirs}experts.{expert}.down_proj.weight"]
            found[f"{own}experts.linear_fc2.weight{expert}"] = columns(down)
        found[own + "shared_experts.linear_fc1.weight"] = fc1(theirs + "shared_expert.")
        found[own + "shared_experts.linear_fc2.weight"] = columns(
            hf[theirs + "shared_expert.down_proj.weight"]
        )
        found[own + "shared_experts.gate_weight"] = hf[theirs + "shared_expert_gate.weight"]
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_megatron_rank_holds_what_the_conversion_gives(oracle, shape, size):
    """With 4 ranks, `dense` has less KV groups than ranks."""
    made = filled(oracle, shape)
    for rank in range(size):
        layout = megatron_layout(shape, "uint16", tp_rank=rank, tp_size=size, vocab_divisor=2)
        agree(layout, made, megatron(shape, made.tensors, rank, size))


def test_the_vocabulary_is_padded_and_a_rank_may_have_nothing_but_padding(oracle):
    layouts = [
        megatron_layout(DENSE, "uint16", tp_rank=rank, tp_size=2, vocab_divisor=16) for rank in range(2)
    ]
    made = filled(oracle, DENSE)
    covered = []
    for layout in layouts:
        spec = next(spec for spec in layout.tensors if spec.name == "output_layer.weight")
        assert spec.shape == (16, DENSE.hidden)
        covered.append(int(made.own(spec)[1].sum()))
    assert covered == [DENSE.vocab * DENSE.hidden, 0]
    made.execute(huggingface_layout(DENSE, "uint16"), layouts)
    made.execute(layouts[1], [huggingface_layout(DENSE, "uint16")])


def test_the_local_spec_keeps_its_norms_beside_the_linear_layers():
    names = {spec.name for spec in megatron_layout(DENSE, "bfloat16", transformer_engine=False).tensors}
    assert {"decoder.layers.1.input_layernorm.weight", "decoder.layers.1.pre_mlp_layernorm.weight"} <= names
    assert not any("layer_norm_weight" in name for name in names)


def test_sequential_experts_are_modules_of_their_own():
    layout = megatron_layout(MIXTURE, "bfloat16", ep_rank=1, ep_size=2, experts="sequential")
    spec = {spec.name: spec for spec in layout.tensors}
    down = spec["decoder.layers.2.mlp.experts.local_experts.1.linear_fc2.weight"]
    assert [piece.source for piece in down.pieces] == ["model.layers.2.mlp.experts.3.down_proj.weight"]
    assert "decoder.layers.2.mlp.experts.local_experts.2.linear_fc2.weight" not in spec


def sources_of(layout: Layout, name: str) -> list[str]:
    """Global tensors of all own tensors whose name ends so, in order of name."""
    return [spec.pieces[0].source for spec in layout.tensors if spec.name.endswith(name)]


def test_pipeline_stages_count_their_layers_from_zero():
    shape = MegatronShape(layers=8, hidden=2, ffn=2, heads=1, kv_groups=1, head_dim=2, vocab=4)
    norm = "post_attention_layernorm.weight"

    def layers(**options) -> list[str]:
        layout = megatron_layout(shape, "float32", pp_size=2, **options)
        return [
            s.split(".")[2] for s in sources_of(layout, "linear_fc1.layer_norm_weight") if s.endswith(norm)
        ]

    assert layers(pp_rank=0) == ["0", "1", "2", "3"]
    assert layers(pp_rank=1) == ["4", "5", "6", "7"]
    assert layers(pp_rank=1, pp_layers=[5, 3]) == ["5", "6", "7"]
    # Interleaved: rank 0 has the first and the third quarter.
    assert layers(pp_rank=0, vpp_size=2) == ["0", "1", "4", "5"]
    assert layers(pp_rank=1, vpp_size=2) == ["2", "3", "6", "7"]
    ends = [
        {spec.name for spec in megatron_layout(shape, "float32", pp_rank=r, pp_size=2, vpp_size=2).tensors}
        for r in range(2)
    ]
    assert "model0.embedding.word_embeddings.weight" in ends[0]
    assert "model1.output_layer.weight" in ends[1]
    assert not any("output_layer" in name for name in ends[0])
    assert not any("embedding" in name for name in ends[1])


def test_a_tied_output_layer_on_a_stage_of_its_own_is_a_copy_of_the_embedding():
    assert sources_of(megatron_layout(BIASED, "float32"), "output_layer.weight") == []
    last = megatron_layout(BIASED, "float32", pp_rank=1, pp_size=2)
    assert sources_of(last, "output_layer.weight") == ["model.embed_tokens.weight"]


def test_an_engine_with_everything_has_plain_hugging_face_tensors(shape):
    layout = huggingface_layout(shape, "bfloat16")
    assert {spec.name: spec.shape for spec in layout.tensors} == shape.tensors()
    assert all(spec.pieces == () for spec in layout.tensors)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_engine_rank_holds_fused_projections_and_stacked_experts(oracle, shape, size):
    made = filled(oracle, shape)
    hf = made.tensors
    groups = min(size, shape.kv_groups)
    for rank in range(size):
        layout = huggingface_layout(
            shape,
            "uint16",
            tp_rank=rank,
            tp_size=size,
            fused_qkv=True,
            fused_gate_up=True,
            experts="w13",
            vocab_divisor=8,
        )
        own = {spec.name: made.own(spec)[0] for spec in layout.tensors}

        def cut(name, parts=size, index=rank, axis=0):
            return np.split(hf[name], parts, axis)[index]

        for layer in range(shape.layers):
            prefix = f"model.layers.{layer}."
            for end in ("weight", "bias") if shape.qkv_bias else ("weight",):
                q, k, v = (f"{prefix}self_attn.{name}_proj.{end}" for name in "qkv")
                parts = [cut(q), *(cut(name, groups, rank * groups // size) for name in (k, v))]
                assert np.array_equal(own[f"{prefix}self_attn.qkv_proj.{end}"], np.concatenate(parts))
            mlp = prefix + "mlp."
            if not shape.is_moe(layer):
                parts = [cut(mlp + "gate_proj.weight"), cut(mlp + "up_proj.weight")]
                assert np.array_equal(own[mlp + "gate_up_proj.weight"], np.concatenate(parts))
                assert np.array_equal(own[mlp + "down_proj.weight"], cut(mlp + "down_proj.weight", axis=1))
                continue
            each = [f"{mlp}experts.{expert}." for expert in range(shape.experts)]
            up = [np.concatenate([cut(e + "gate_proj.weight"), cut(e + "up_proj.weight")]) for e in each]
            assert np.array_equal(own[mlp + "experts.w13_weight"], np.stack(up))
            down = [cut(e + "down_proj.weight", axis=1) for e in each]
            assert np.array_equal(own[mlp + "experts.w2_weight"], np.stack(down))
        rows = -(-shape.vocab // 8) * 8 // size
        held = hf["model.embed_tokens.weight"][rows * rank : rows * (rank + 1)]
        assert np.array_equal(own["model.embed_tokens.weight"][: len(held)], held)


@st.composite
def trainers(draw, shape: MegatronShape) -> list[Layout]:
    """All ranks of a Megatron run."""
    tp = draw(st.sampled_from([1, 2, 4]))
    pp, vpp = draw(
        st.sampled_from([(1, 1), (2, 1), (1, 2)] if shape.layers == 2 else [(1, 1), (3, 1), (1, 3)])
    )
    ep = draw(st.sampled_from([1, 2, 4])) if shape.experts else 1
    etp = draw(st.sampled_from([1, tp]))
    options = {
        "vocab_divisor": draw(st.sampled_from([1, 4])),
        "experts": draw(st.sampled_from(["grouped", "sequential"])),
        "transformer_engine": draw(st.booleans()),
    }
    return [
        megatron_layout(
            shape,
            "uint16",
            tp_rank=t,
            tp_size=tp,
            pp_rank=p,
            pp_size=pp,
            ep_rank=e,
            ep_size=ep,
            etp_rank=t if etp > 1 else 0,
            etp_size=etp,
            vpp_size=vpp,
            **options,
        )
        for p, e, t in itertools.product(range(pp), range(ep), range(tp))
    ]


@st.composite
def engines(draw, shape: MegatronShape) -> list[Layout]:
    """All ranks of an engine."""
    tp, ep = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])) if shape.experts else 1
    options = {
        "fused_qkv": draw(st.booleans()),
        "fused_gate_up": draw(st.booleans()),
        "experts": draw(st.sampled_from(["each", "w13", "gate_up_proj"])),
        "vocab_divisor": draw(st.sampled_from([4, 64])),
    }
    return [
        huggingface_layout(shape, "uint16", tp_rank=t, tp_size=tp, ep_rank=e, ep_size=ep, **options)
        for e, t in itertools.product(range(ep), range(tp))
    ]


@settings(steady, max_examples=50)
@given(st.data(), st.sampled_from(sorted(SHAPES)))
def test_trainers_and_engines_of_any_size_fill_each_other(oracle, data, name):
    shape = SHAPES[name]
    kinds = st.one_of(trainers(shape), engines(shape))
    sources = data.draw(kinds)
    destination = data.draw(st.sampled_from(data.draw(kinds)))
    filled(oracle, shape).execute(destination, sources, chunk_bytes=256, grain=32, turn=len(sources) // 2)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"tp_size": 3}, "heads 4 is no multiple of tp_size 3"),
        ({"tp_rank": 2, "tp_size": 2}, "tp_rank 2 of tp_size 2"),
        ({"pp_rank": -1}, "pp_rank -1"),
        ({"ep_size": 3}, "experts 4 is no multiple"),
        ({"etp_rank": 0, "etp_size": 3}, "moe_ffn 4 is no multiple of etp_size 3"),
        ({"pp_size": 2}, r"layers 3 is no multiple of pp_size \* vpp_size 2"),
        ({"pp_size": 2, "pp_layers": [1, 1]}, "expected 2 numbers that sum up to 3"),
        ({"vpp_size": 3, "pp_layers": [3]}, "virtual"),
    ],
)
def test_what_megatron_would_not_build_is_refused(options, fault):
    with pytest.raises(ValueError, match=fault):
        megatron_layout(MIXTURE, "bfloat16", **options)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"tp_size": 2}, "padded vocabulary 11 is no multiple of tp_size 2"),
        ({"tp_size": 3}, "heads 4 is no multiple"),
        ({"ep_rank": 1}, "ep_rank 1 of ep_size 1"),
    ],
)
def test_what_an_engine_cannot_cut_is_refused(options, fault):
    with pytest.raises(ValueError, match=fault):
        huggingface_layout(DENSE, "bfloat16", **options)


def test_a_shape_comes_from_a_hugging_face_configuration():
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "hidden_size": 8,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "vocab_size": 33,
        "num_experts": 8,
        "moe_intermediate_size": 5,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "tie_word_embeddings": False,
    }
    shape = MegatronShape.from_huggingface(config)
    assert shape == MegatronShape(
        4, 8, 24, 4, 2, 6, 33, experts=8, moe_ffn=5, dense_layers=(0, 1, 2), qk_layernorm=True
    )
    tensors = shape.tensors()
    assert tensors["model.layers.3.mlp.experts.7.down_proj.weight"] == (8, 5)
    assert tensors["model.layers.1.mlp.up_proj.weight"] == (24, 8)
    assert "model.layers.1.mlp.gate.weight" not in tensors

    plain = {name: value for name, value in config.items() if name not in ("head_dim", "num_key_value_heads")}
    renamed = plain | {"num_experts": None, "num_local_experts": 8}
    assert MegatronShape.from_huggingface(renamed).experts == 8
    qwen2 = MegatronShape.from_huggingface(plain | {"model_type": "qwen2", "num_experts": None})
    assert (qwen2.kv_groups, qwen2.head_dim, qwen2.qkv_bias, qwen2.experts) == (4, 2, True, 0)
    with pytest.raises(ValueError, match="'mamba'"):
        MegatronShape.from_huggingface({"model_type": "mamba"})
    with pytest.raises(ValueError, match="mlp_bias"):
        MegatronShape.from_huggingface(config | {"model_type": "llama", "mlp_bias": True})


@pytest.mark.parametrize("change", [{"kv_groups": 3}, {"kv_groups": 0}, {"experts": 2}])
def test_a_shape_that_cannot_be_is_refused(change):
    sizes = {"layers": 1, "hidden": 4, "ffn": 4, "heads": 4, "kv_groups": 2, "head_dim": 2, "vocab": 8}
    with pytest.raises(ValueError, match=r"heads|experts"):
        MegatronShape(**(sizes | change))


def test_pieces_are_of_the_tensors_that_the_shape_names(shape):
    shapes = shape.tensors()
    for layout in (megatron_layout(shape, "float32"), huggingface_layout(shape, "float32", fused_qkv=True)):
        for spec in layout.tensors:
            assert isinstance(spec, TensorSpec)
            for piece in spec.pieces:
                assert shapes[piece.source] == piece.shape
