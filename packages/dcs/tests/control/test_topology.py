"""Who pulls from whom, as a pure function."""

import dataclasses
from random import Random

import pytest
from dcs.control.messages import Endpoint
from dcs.control.topology import MAX_HOLDERS, MAX_PEERS, Fabric, Rank, Receiver, assign
from hypothesis import given, settings
from hypothesis import strategies as st


def rank(index: int = 0, layout: str = "L", machine: str = "trainer", path: str = "") -> Rank:
    return Rank(index + 1, index, f"rank-{index}", layout, Endpoint("192.0.2.1", 10 + index, machine, path))


def receiver(
    member: int, machine: str = "", *, path: str = "", host: str = "192.0.2.2", **options
) -> Receiver:
    machine = machine or f"m{member}"
    options.setdefault("layout", "L")
    return Receiver(member, f"e{member}", endpoint=Endpoint(host, 1, machine, path), **options)


def numbers(sources) -> list[int]:
    return [source.member for source in sources]


def test_a_chain_goes_by_the_order_of_joining_with_ancestors_as_fall_backs():
    given_ = assign([rank()], [receiver(member) for member in (13, 11, 12)])
    assert [numbers(given_[member]) for member in (11, 12, 13)] == [[1], [11, 1], [12, 11, 1]]


def test_beyond_eight_heads_the_chain_becomes_a_binary_tree():
    chain = assign([rank()], [receiver(10 + index) for index in range(8)])
    assert numbers(chain[17]) == [16, 15, 14, 13, 12, 11, 10, 1]
    tree = assign([rank()], [receiver(10 + index) for index in range(15)])
    assert [numbers(tree[10 + index])[0] for index in range(15)] == [
        1, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15, 16, 16,
    ]  # fmt: skip


def test_a_machine_has_one_head_which_the_others_map():
    members = [receiver(member, machine, path="/s") for member, machine in [(11, "a"), (12, "a"), (13, "b")]]
    found = assign([rank()], members)
    assert numbers(found[11]) == [1]
    assert numbers(found[12]) == [11, 1]
    assert numbers(found[13]) == [11, 1]


def test_members_that_cannot_be_mapped_are_heads_by_themselves():
    found = assign([rank()], [receiver(member, "a", host="127.0.0.1") for member in (11, 12, 13)])
    assert [numbers(found[member]) for member in (11, 12, 13)] == [[1], [11, 1], [12, 11, 1]]


def test_a_rank_on_the_same_machine_with_the_same_layout_is_mapped_and_its_reader_is_the_root():
    ranks = [rank(0, "L0", "a", "/r0"), rank(1, "L", "b", "/r1")]
    members = [receiver(11, "c", path="/s"), receiver(12, "b", path="/s"), receiver(13, "b", path="/s")]
    found = assign(ranks, members)
    assert numbers(found[12]) == [2, 1]
    assert numbers(found[13]) == [2, 12, 1]
    assert numbers(found[11]) == [12, 1, 2]
    alone = assign(ranks, members, relay=False)
    assert [numbers(alone[member]) for member in (11, 12, 13)] == [[1, 2], [2, 1], [2, 1]]


def test_without_relays_only_mapping_and_the_ranks_are_left():
    members = [receiver(11, "a", path="/s"), receiver(12, "a", path="/s"), receiver(13, holds=True)]
    found = assign([rank()], members, relay=False)
    assert [numbers(found[member]) for member in (11, 12, 13)] == [[1], [11, 1], [1]]


def test_who_has_the_version_comes_before_the_relay_and_is_not_the_same_for_all():
    members = [receiver(10 + index, holds=index < 12) for index in range(16)]
    found = assign([rank()], members)
    firsts = set()
    for member in (22, 23, 24, 25):
        sources = found[member]
        assert [source.holds for source in sources[:MAX_HOLDERS]] == [True] * MAX_HOLDERS
        assert numbers(sources)[-1] == 1
        assert len(sources) <= MAX_PEERS + 1
        firsts.add(sources[0].member)
    assert len(firsts) == 4
    assert numbers(found[10])[0] == 1  # the root asks the ranks
    assert all(source.holds for source in found[10])


def test_holders_of_other_sites_come_after_the_own_site_and_before_the_ranks():
    members = [receiver(11, site="x", holds=True), receiver(12, site="y"), receiver(13, site="y")]
    found = assign([rank()], members)
    assert numbers(found[13]) == [12, 11, 1]
    assert numbers(found[12]) == [1, 11]  # the root of its site


def test_other_layouts_are_no_sources():
    found = assign([rank()], [receiver(11, layout="A", holds=True), receiver(12, layout="B")])
    assert numbers(found[12]) == [1]


def test_a_slow_member_is_a_leaf():
    members = [receiver(11), receiver(12, slow=True, holds=True), receiver(13)]
    found = assign([rank()], members)
    assert numbers(found[13]) == [11, 1]
    assert numbers(found[12])[0] == 13
    only_slow = assign([rank()], [dataclasses.replace(member, slow=True) for member in members])
    assert all(numbers(sources) == [1] for sources in only_slow.values())


def test_leaves_are_spread_over_the_relays():
    members = [receiver(10), receiver(11), *(Receiver(20 + i, f"l{i}", "L", None) for i in range(4))]
    found = assign([rank()], members)
    assert [numbers(found[20 + index])[0] for index in range(4)] == [11, 10, 11, 10]


def test_loopback_is_reached_from_its_own_machine_only():
    members = [
        receiver(11, "a", host="127.0.0.1"),
        receiver(12, "b"),
        receiver(13, "a", host="::1", holds=True),
        receiver(14, "c"),
        Receiver(15, "nowhere", "L", Endpoint("127.0.0.1", 1), holds=True),
    ]
    found = assign([rank()], members)
    assert numbers(found[12]) == [1]
    assert numbers(found[14]) == [12, 1]
    assert numbers(found[11]) == [13, 14, 12, 1]
    assert numbers(found[13]) == [11, 14, 12, 1]


def mesh_of(seed: int, size: int) -> tuple[list[Rank], list[Receiver]]:
    """Ranks, and receivers of all kinds; drawn here, as drawing each by hypothesis takes most of the time."""
    random = Random(seed)
    choose = random.choice
    ranks = [
        rank(index, choose("LM"), choose("tab"), choose(["", "/r"])) for index in range(random.randint(1, 3))
    ]
    members = []
    for index in range(size):
        machine = choose(["", "a", "b", "c", f"m{index}"])
        host = "127.0.0.1" if machine == "b" or random.random() < 0.1 * (not machine) else "192.0.2.2"
        endpoint = Endpoint(host, 1, machine, choose(["", "/s"]))
        members.append(
            Receiver(
                100 + index,
                f"e{index}",
                choose("LLM"),
                endpoint if random.random() < 0.9 else None,
                choose(["", "", "far"]),
                holds=random.random() < 0.25,
                slow=random.random() < 0.15,
            )
        )
    return ranks, members


meshes = st.builds(mesh_of, st.integers(0, 1 << 30), st.integers(0, 40))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(meshes)
def test_whatever_the_mesh(mesh):
    ranks, members = mesh
    found = assign(ranks, members)
    by_number = {member.member: member for member in members}
    shuffled = list(members)
    Random(1).shuffle(shuffled)
    assert assign(ranks, shuffled) == found  # the same, whatever the order of the members
    position = {}

    def visit(number: int, path: tuple[int, ...]) -> None:
        assert number not in path, "a cycle"
        if number in position:
            return
        for source in found[number]:
            if source.rank < 0 and not source.holds:
                visit(source.member, (*path, number))
        position[number] = len(position)

    for number, sources in found.items():
        me = by_number[number]
        visit(number, ())
        peers = [source for source in sources if source.rank < 0]
        assert len(peers) <= MAX_PEERS
        assert {source.rank for source in sources if source.rank >= 0} == {r.rank for r in ranks}
        assert len({source.member for source in sources}) == len(sources)
        for source in peers:
            peer = by_number[source.member]
            assert peer is not me
            assert peer.layout == me.layout
            assert not peer.slow
            assert peer.endpoint is not None
            assert peer.endpoint.host != "127.0.0.1" or (
                me.endpoint is not None and peer.endpoint.machine == me.endpoint.machine != ""
            )
    mapping = {(r.endpoint.machine, r.layout) for r in ranks if r.endpoint.path}

    def maps_a_rank(member: Receiver) -> bool:
        own = member.endpoint
        return own is not None and bool(own.path) and (own.machine, member.layout) in mapping

    for key in {(member.site, member.layout) for member in members}:
        group = [member for member in members if (member.site, member.layout) == key]
        relays = [m for m in group if m.endpoint and m.endpoint.host != "127.0.0.1" and not m.slow]
        pulling = [m for m in group if found[m.member][0].rank >= 0 and not maps_a_rank(m)]
        if relays:  # exactly one pulls from the ranks over the network, none if one maps a rank
            assert len(pulling) == (not any(maps_a_rank(member) for member in relays))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(meshes, st.integers(0, 40))
def test_one_by_one_gives_the_same_as_all_at_once(mesh, begin):
    ranks, members = mesh
    without = [dataclasses.replace(member, holds=False) for member in members]
    fabric = Fabric(ranks, without[:begin])
    for index, member in enumerate(without[begin:], begin):
        if not fabric.add(member):
            fabric = Fabric(ranks, without[: index + 1])
    for member in reversed(members):
        if member.holds:
            fabric.hold(member.member)
    assert {member.member: fabric.sources(member.member) for member in members} == assign(ranks, members)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(meshes, st.integers(0, 39))
def test_the_children_of_a_dead_relay_get_other_parents(mesh, index):
    ranks, members = mesh
    if not members:
        return
    dead = members[index % len(members)].member
    found = assign(ranks, [member for member in members if member.member != dead])
    for sources in found.values():
        assert dead not in numbers(sources)
        assert any(source.rank >= 0 for source in sources)


@pytest.mark.parametrize("count", [2000])
def test_two_thousand_receivers_are_assigned_in_a_moment(count):
    members = [receiver(10 + index, holds=index % 3 == 0) for index in range(count)]
    found = assign([rank(index) for index in range(8)], members)
    depth = {}
    for member in members:
        parents = [s.member for s in found[member.member] if s.rank < 0 and not s.holds]
        depth[member.member] = 1 + max((depth.get(parent, 0) for parent in parents), default=0)
    assert max(depth.values()) <= 11
