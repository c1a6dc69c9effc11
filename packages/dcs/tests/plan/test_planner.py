"""Plans between random layouts, against plain slicing; balance, caching, and what is refused."""

import itertools
import time

import numpy as np
import pytest
from dcs.errors import LayoutMismatch
from dcs.layout import Layout, Piece, TensorSpec, concatenated, own_shape, shard, stacked, whole
from dcs.plan import blocks, plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# The same examples everywhere, and no clock: the machine may be busy.
steady = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def layout(tensors: dict[str, tuple[Piece, ...]], dtypes: dict[str, str] | str = "uint16") -> Layout:
    """Own tensors that are just as large as their pieces."""
    specs = [
        TensorSpec(name, own_shape(pieces), dtypes if isinstance(dtypes, str) else dtypes[name], pieces)
        for name, pieces in sorted(tensors.items())
    ]
    return Layout(tuple(specs))


# A model of a few layers, cut as training ranks and engines do it.


@st.composite
def models(draw) -> dict[str, tuple[int, ...]]:
    hidden = draw(st.integers(2, 7))
    heads, kv, head = draw(st.sampled_from([(4, 2, 3), (6, 2, 2), (4, 4, 2), (8, 1, 1)]))
    ffn, vocabulary, experts = (
        draw(st.integers(3, 9)),
        draw(st.integers(4, 11)),
        draw(st.sampled_from([0, 4, 6])),
    )
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocabulary, hidden), "norm": (hidden,), "scale": ()}
    for index in range(draw(st.integers(1, 3))):
        shapes |= {
            f"{index}.q": (heads * head, hidden),
            f"{index}.k": (kv * head, hidden),
            f"{index}.v": (kv * head, hidden),
            f"{index}.o": (hidden, heads * head),
            f"{index}.norm": (hidden,),
        }
        for prefix in [f"{index}.e{expert}" for expert in range(experts)] or [str(index)]:
            shapes |= {
                f"{prefix}.gate": (ffn, hidden),
                f"{prefix}.up": (ffn, hidden),
                f"{prefix}.down": (hidden, ffn),
            }
    return shapes


@st.composite
def gangs(draw, shapes: dict[str, tuple[int, ...]]) -> list[Layout]:
    """Layouts of all ranks of one way to lay a model out."""
    layers = len({name.split(".")[0] for name in shapes if name[0].isdigit()})
    experts = len({name.split(".")[1] for name in shapes if ".e" in name and name.startswith("0.")})
    tp, pp, ep = draw(st.integers(1, 4)), draw(st.integers(1, layers)), draw(st.sampled_from([1, 2]))
    ep = ep if experts else 1
    replicas = draw(st.integers(1, 2))
    fused, grouped, own_names = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    dtype = {name: "uint32" if name.endswith("norm") else "uint16" for name in shapes}

    def cut(name: str, rank: int) -> tuple[Piece, ...]:
        shape = shapes[name]
        if name == "embed" or name.split(".")[-1] in ("q", "k", "v", "gate", "up"):
            return shard(name, shape, 0, rank, tp)
        if name.split(".")[-1] in ("o", "down"):
            return shard(name, shape, 1, rank, tp)
        return whole(name, shape)

    gang: list[Layout] = []
    for _, stage, group, rank in itertools.product(range(replicas), range(pp), range(ep), range(tp)):
        tensors: dict[str, tuple[Piece, ...]] = {}
        if stage == 0:
            tensors["embed"] = cut("embed", rank)
        if stage == pp - 1:
            tensors |= {"norm": whole("norm", shapes["norm"]), "scale": whole("scale", ())}
        for index in range(layers):
            if index * pp // layers != stage:
                continue
            prefix = str(index)
            mine = [e for e in range(experts) if e * ep // experts == group]
            ends = [f".e{e}" for e in mine] if experts else [""]
            tensors |= {f"{prefix}.{end}": cut(f"{prefix}.{end}", rank) for end in ("o", "norm")}
            attention = {end: cut(f"{prefix}.{end}", rank) for end in ("q", "k", "v")}
            if fused:
                tensors[f"{prefix}.qkv"] = concatenated(attention.values())
            else:
                tensors |= {f"{prefix}.{end}": pieces for end, pieces in attention.items()}
            up = [[cut(f"{prefix}{end}.{kind}", rank) for kind in ("gate", "up")] for end in ends]
            down = [cut(f"{prefix}{end}.down", rank) for end in ends]
            if grouped:
                tensors[f"{prefix}.w13"] = stacked(concatenated(pair) for pair in up)
                tensors[f"{prefix}.w2"] = stacked(down)
            else:
                for end, pair, single in zip(ends, up, down, strict=True):
                    tensors[f"{prefix}{end}.down"] = single
                    if fused:
                        tensors[f"{prefix}{end}.gate_up"] = concatenated(pair)
                    else:
                        tensors |= {f"{prefix}{end}.gate": pair[0], f"{prefix}{end}.up": pair[1]}
        types = {name: dtype[pieces[0].source] for name, pieces in tensors.items()}
        made = layout(tensors, types)
        if own_names:  # a rank may call its tensors what it likes
            made = Layout(
                tuple(
                    TensorSpec(f"w.{spec.name}", spec.shape, spec.dtype, spec.pieces) for spec in made.tensors
                )
            )
        gang.append(made)
    return gang


@settings(steady, max_examples=60)
@given(st.data(), st.sampled_from([8, 64, 1 << 16]), st.sampled_from([16, 100, 1 << 20]), st.integers(0, 5))
def test_any_rank_of_a_gang_is_filled_from_any_other_gang(oracle, data, grain, chunk_bytes, turn):
    shapes = data.draw(models())
    dtypes = {name: "uint32" if name.endswith("norm") else "uint16" for name in shapes}
    sources = data.draw(st.permutations(data.draw(gangs(shapes))))
    destination = data.draw(st.sampled_from(data.draw(gangs(shapes))))
    oracle(shapes, dtypes).execute(destination, sources, chunk_bytes, grain=grain, turn=turn)


# Boxes without any rule.


@st.composite
def partitions(draw, name: str, shape: tuple[int, ...]) -> list[Piece]:
    """Boxes that make up a global tensor, found by cutting again and again."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        start, extent = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        place = draw(st.integers(0, extent[dim]))
        low, high = list(extent), list(extent)
        low[dim], high[dim] = place, extent[dim] - place
        begin = list(start)
        begin[dim] += place
        boxes += [(start, tuple(low)), (tuple(begin), tuple(high))]
    return [Piece(name, shape, start, (0,) * len(shape), extent) for start, extent in boxes]


@st.composite
def box_layouts(draw, shapes: dict[str, tuple[int, ...]], ranks: int) -> list[Layout]:
    """Every rank holds some boxes of several partitions; at least one holds each box of the first one."""
    held: list[dict[str, tuple[Piece, ...]]] = [{} for _ in range(ranks)]
    for name, shape in shapes.items():
        for layer in range(draw(st.integers(1, 2))):
            for index, piece in enumerate(draw(partitions(name, shape))):
                owners = draw(st.sets(st.integers(0, ranks - 1), min_size=1 if layer == 0 else 0))
                for owner in sorted(owners):
                    held[owner][f"{name}/{layer}/{index}"] = (piece,)
    return [layout(tensors, "uint32") for tensors in held]


@settings(steady, max_examples=120)
@given(st.data(), st.lists(st.lists(st.integers(1, 6), max_size=4).map(tuple), min_size=1, max_size=3))
def test_any_boxes_are_filled_from_any_overlapping_boxes(oracle, data, shapes):
    named = {f"t{index}": shape for index, shape in enumerate(shapes)}
    sources = data.draw(box_layouts(named, data.draw(st.integers(1, 4))))
    destination = data.draw(box_layouts(named, 1))[0]
    made = oracle(named, dict.fromkeys(named, "uint32"))
    made.execute(
        destination, sources, grain=data.draw(st.sampled_from([4, 32])), turn=data.draw(st.integers(0, 3))
    )


# The reshards that the design page names.

SHAPES = {
    "a.q": (64, 32),
    "a.o": (32, 64),
    "a.norm": (32,),
    "b.q": (64, 32),
    "b.o": (32, 64),
    "b.norm": (32,),
}


def cut(rank: int, size: int, layers: str = "ab") -> Layout:
    return layout(
        {
            f"{layer}.{end}": shard(f"{layer}.{end}", SHAPES[f"{layer}.{end}"], dim, rank, size)
            if dim >= 0
            else whole(f"{layer}.{end}", SHAPES[f"{layer}.{end}"])
            for layer in layers
            for end, dim in (("q", 0), ("o", 1), ("norm", -1))
        }
    )


@pytest.mark.parametrize(
    ("sources", "destinations"),
    [
        ([cut(rank, 2) for rank in range(2)], [cut(rank, 4) for rank in range(4)]),
        ([cut(rank, 4) for rank in range(4)], [cut(0, 1)]),
        ([cut(0, 1, "a"), cut(0, 1, "b")], [cut(0, 1)]),
        ([cut(rank, 3) for rank in range(3)], [cut(rank, 5) for rank in range(5)]),
    ],
    ids=["TP2 to TP4", "TP4 to TP1", "PP2 to PP1", "TP3 to TP5"],
)
def test_named_reshards_move_what_is_needed_and_no_more(oracle, sources, destinations):
    made = oracle(SHAPES, dict.fromkeys(SHAPES, "uint16"))
    for turn, destination in enumerate(destinations):
        sent = made.execute(destination, sources, turn=turn)
        assert sum(sent) == sum(spec.nbytes for spec in destination.tensors)


def test_an_identical_layout_is_one_row():
    odd = layout({name: whole(name, shape) for name, shape in {"a": (3, 3), "b": (5,), "c": (7, 7)}.items()})
    _, nbytes = odd.offsets()
    made = plan(odd, [odd])
    assert np.array_equal(made.blocks[0], blocks.identity(nbytes))
    assert made.nbytes == nbytes


def test_neighbours_on_both_sides_are_one_row():
    part = layout({"a": whole("a", (4, 64)), "b": whole("b", (4, 64))})
    other = layout({"a": whole("a", (4, 64)), "b": whole("b", (4, 64)), "z": whole("z", (1,))})
    assert plan(part, [other]).blocks[0].tolist() == [[0, 1024, 0, 1024, 1024, 1]]


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_replicas_of_another_layout_send_about_as_much_in_few_parts(oracle, replicas):
    shapes = {"big": (512, 1024), **{f"{index:02}.norm": (700,) for index in range(30)}, "tail": (99, 1000)}
    source = layout({name: whole(name, shape) for name, shape in shapes.items()})
    fused = layout(
        {"w": whole("big", shapes["big"])} | {f"v.{n}": whole(n, s) for n, s in shapes.items() if n != "big"}
    )
    made = plan(fused, [source] * replicas)
    sent = oracle(shapes, dict.fromkeys(shapes, "uint16")).execute(fused, [source] * replicas)
    assert max(sent) <= 1.25 * made.nbytes / replicas
    assert sum(map(len, made.blocks)) <= len(shapes) + 2 * replicas


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_twins_send_equal_ranges_of_their_buffer(oracle, replicas):
    shapes = {"big": (512, 1024), "norm": (3,), "tail": (99, 1000)}
    twin = layout({name: whole(name, shape) for name, shape in shapes.items()})
    other = layout({"part": shard("big", shapes["big"], 0, 0, 2)})
    made = plan(twin, [other, *[twin] * replicas], turn=1)
    assert [len(rows) for rows in made.blocks] == [0] + [1] * replicas
    sent = oracle(shapes, dict.fromkeys(shapes, "uint16")).execute(twin, [other, *[twin] * replicas], turn=1)
    assert max(sent) <= 1.25 * made.nbytes / replicas


def test_what_only_one_rank_has_is_made_up_for_by_what_all_have():
    """TP2: rank 0 alone must send its half of q, so the replicated tensor comes from rank 1."""
    shapes = {"q": (512, 512), "shared": (256, 512)}
    sources = [
        layout({"q": shard("q", shapes["q"], 0, rank, 2), "shared": whole("shared", shapes["shared"])})
        for rank in range(2)
    ]
    destination = layout({"q": shard("q", shapes["q"], 0, 0, 2), "s": whole("shared", shapes["shared"])})
    sent = [int(blocks.nbytes(blocks.source_side(rows))) for rows in plan(destination, sources).blocks]
    assert sent == [512 * 256 * 2] * 2


def test_sources_that_cut_a_tensor_in_different_ways_share_it(oracle):
    shapes = {"q": (1024, 256)}
    rows, columns = (
        [layout({"q": shard("q", shapes["q"], dim, rank, 2)}) for rank in range(2)] for dim in (0, 1)
    )
    sources = [*rows, *columns, layout({"q": whole("q", shapes["q"]), "other": whole("q", shapes["q"])})]
    destination = layout({"w": whole("q", shapes["q"])})
    sent = oracle(shapes, {"q": "uint16"}).execute(destination, sources, grain=1024)
    assert max(sent) <= 1.25 * sum(sent) / len(sources)


def test_a_tensor_with_few_long_rows_is_shared_along_them(oracle):
    shapes = {"q": (3, 65536)}
    source, destination = layout({"q": whole("q", shapes["q"])}), layout({"w": whole("q", shapes["q"])})
    sent = oracle(shapes, {"q": "uint32"}).execute(destination, [source] * 4, grain=4096)
    assert max(sent) - min(sent) <= 4096


def test_ties_fall_on_another_source_at_each_turn():
    sources = [layout({"n": whole("n", (8,)), f"own{rank}": whole(f"own{rank}", (1,))}) for rank in range(4)]
    destination = layout({"n": whole("n", (8,))})
    senders = [
        [len(rows) for rows in plan(destination, sources, turn=turn).blocks].index(1) for turn in range(8)
    ]
    assert senders == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_plan_is_computed_once_for_a_pair_of_layouts():
    sources = [cut(rank, 2) for rank in range(2)]
    first = plan(cut(1, 4), sources, turn=3, who="engine-0")
    assert plan(cut(1, 4), [cut(0, 2), cut(1, 2)], turn=5, who="engine-1") is first
    assert plan(cut(1, 4), sources, turn=4) is not first
    with pytest.raises(ValueError, match="read-only"):
        first.blocks[0][0, 0] = 1


def test_bytes_that_no_piece_covers_are_left_alone(oracle):
    """A vocabulary padded for tensor parallelism, on either side."""
    shapes = {"embed": (10, 4)}
    padded = Layout((TensorSpec("embedding", (16, 4), "uint16", whole("embed", (10, 4))),))
    halves = [
        Layout(
            (TensorSpec("w", (8, 4), "uint16", (Piece("embed", (10, 4), (start, 0), (0, 0), (rows, 4)),)),)
        )
        for start, rows in ((0, 8), (8, 2))
    ]
    made = oracle(shapes, {"embed": "uint16"})
    plain = layout({"embed": whole("embed", (10, 4))})
    for destination, sources in (
        (padded, [plain]),
        (plain, [padded]),
        (padded, halves),
        (halves[1], [padded]),
    ):
        made.execute(destination, sources)


def test_the_first_tensor_that_is_not_covered_is_named_with_the_box():
    missing = r"engine-0: tensor 'a\.o'.*a\.o\[0:32, 32:48\] of it is held by no source"
    with pytest.raises(LayoutMismatch, match=missing) as caught:
        plan(cut(0, 1), [cut(0, 4), cut(1, 4), cut(3, 4)], who="engine-0")
    assert caught.value.tensor == "a.o"
    with pytest.raises(
        LayoutMismatch, match=r"tensor 'b\.norm'.*no source has a global tensor of that name"
    ) as caught:
        plan(cut(0, 1), [cut(0, 1, "a")])
    assert (caught.value.tensor, caught.value.got) == ("b.norm", "absent")
    with pytest.raises(LayoutMismatch, match=r"a\.norm"):
        plan(cut(0, 1), [])


@pytest.mark.parametrize(
    ("spec", "got"),
    [
        (TensorSpec("a.q", (64, 32), "uint32"), "uint32[64, 32]"),
        (TensorSpec("a.q", (32, 64), "uint16"), "uint16[32, 64]"),
    ],
)
def test_another_dtype_or_global_shape_is_named(spec, got):
    source = Layout(tuple(spec if old.name == "a.q" else old for old in cut(0, 1).tensors))
    with pytest.raises(LayoutMismatch, match=r"'a\.q'") as caught:
        plan(cut(1, 2), [cut(0, 2), source])
    assert (caught.value.tensor, caught.value.got, caught.value.expected) == ("a.q", got, "uint16[64, 32]")


def test_nothing_to_fetch_is_an_empty_plan():
    empty = Layout(())
    assert plan(empty, []).blocks == ()
    made = plan(Layout((TensorSpec("w", (0, 3), "float32"),)), [cut(0, 1)])
    assert (made.nbytes, len(made.blocks[0])) == (0, 0)


def test_a_model_of_1500_tensors_on_8_ranks_is_planned_in_time_that_nobody_notices():
    shapes = {f"{index:04}.w": (4096, 4096) for index in range(1500)}
    sources = [
        layout(
            {n: shard(n, s, index % 2, rank, 8) for index, (n, s) in enumerate(shapes.items())}, "bfloat16"
        )
        for rank in range(8)
    ]
    destination = layout(
        {n: shard(n, s, index % 2, 1, 3) for index, (n, s) in enumerate(shapes.items())}, "bfloat16"
    )
    began = time.process_time()
    made = plan(destination, sources)
    assert time.process_time() - began < 4.0  # the goal is 0.5; pairs of all with all take minutes
    assert made.nbytes == sum(spec.nbytes for spec in destination.tensors)
