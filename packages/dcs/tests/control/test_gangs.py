"""Publishers of several ranks: one epoch for a gang, one version of all parts, without sockets or time."""

import pytest
from dcs.control.messages import Announced, Complete, Fenced, Joined, Refused, RunState
from dcs.layout import Layout, Piece, TensorSpec


def half(index: int) -> Layout:
    """One half of the rows of a tensor of four."""
    piece = Piece("w", (4, 2), (2 * index, 0), (0, 0), (2, 2))
    return Layout((TensorSpec("w", (2, 2), "float32", (piece,)),))


WHOLE = Layout((TensorSpec("w", (4, 2), "float32"),))


@pytest.fixture
def pair(talk):
    """Two ranks of a gang, and a subscriber."""
    said = talk()
    for index, who in enumerate("ab"):
        said.rank(who, index, 2, "job", layout=half(index))
    said.join("s", "subscriber", layout=WHOLE)
    return said


def test_ranks_of_one_session_share_an_epoch(talk):
    said = talk()
    said.join("s", "subscriber", layout=WHOLE)
    assert said.rank("a", 0, 2, "job", layout=half(0)).epoch == 1
    assert said.last("s", RunState).publisher == "absent"
    assert said.rank("b", 1, 2, "job", layout=half(1)).epoch == 1
    assert said.last("s", RunState).publisher == "alive"


def test_a_version_is_offered_when_all_ranks_have_announced_it(pair):
    assert isinstance(pair.announce("b", 0, root=20), Announced)
    assert pair.announced("s") is None
    assert pair.last("a", Complete) is None
    assert isinstance(pair.announce("a", 0, root=10), Announced)
    state = pair.last("s", RunState)
    assert state.announcement.roots == (bytes([10]) * 16, bytes([20]) * 16)
    assert [source.rank for source in state.sources] == [0, 1]
    for who in "ab":
        assert pair.last(who, Complete).version == 0


def test_parts_of_the_next_version_wait_for_the_one_before(pair):
    pair.announce("a", 0)
    pair.announce("a", 1)
    pair.announce("b", 0)
    assert pair.announced("s") == (1, 0)
    pair.announce("b", 1)
    assert pair.announced("s") == (1, 1)


def test_a_version_that_one_rank_skips_is_never_offered(pair):
    pair.announce("a", 0)
    pair.announce("a", 1)
    pair.announce("b", 1)
    assert pair.announced("s") == (1, 1)
    refused = pair.announce("b", 0)
    assert isinstance(refused, Refused)
    assert "publish 2 or later" in refused.message


def test_of_incomplete_versions_the_last_three_are_kept(pair):
    for version in range(5):
        pair.announce("a", version)
    pair.announce("b", 1)  # rank 0's part of it is forgotten
    assert pair.announced("s") is None
    pair.announce("b", 4)
    assert pair.announced("s") == (1, 4)


def test_a_rank_announces_versions_in_order_and_each_with_one_root(pair):
    pair.announce("a", 3)
    assert isinstance(pair.announce("a", 2), Refused)
    other = pair.announce("a", 3, root=9)
    assert isinstance(other, Refused)
    assert "with other weights" in other.message
    assert isinstance(pair.announce("a", 3), Announced)


def test_another_gang_makes_a_new_epoch_and_fences_all_of_the_old_one(pair):
    assert pair.rank("c", 0, 2, "job 2", layout=half(0)).epoch == 2
    for who in "ab":
        assert not pair.last(who, Fenced).rejoin
    assert pair.rank("d", 1, 2, "job 2", layout=half(1)).epoch == 2


def test_another_world_size_is_another_gang(pair):
    pair.announce("a", 0)
    pair.announce("b", 0)
    joined = pair.rank("c", 0, 1, "job", layout=WHOLE)
    assert (joined.epoch, joined.version, joined.root) == (2, 0, b"")
    assert not pair.last("a", Fenced).rejoin
    assert isinstance(pair.announce("c", 0), Refused)  # its root cannot be compared with those of two
    assert isinstance(pair.announce("c", 1), Announced)
    assert pair.announced("s") == (2, 1)


def test_a_new_process_on_a_ranks_place_makes_a_new_epoch_to_which_the_others_move(pair):
    pair.announce("a", 0)
    pair.announce("b", 0)
    pair.announce("a", 1)
    assert pair.rank("b2", 1, 2, "job", layout=half(1)).epoch == 2
    assert not pair.last("b", Fenced).rejoin
    assert pair.last("a", Fenced).rejoin
    again = pair.rank("a", 0, 2, "job", layout=half(0), known=(1, 0))
    assert (again.epoch, again.version, again.root) == (2, 0, bytes(16))
    assert isinstance(pair.announce("a", 0), Announced)  # what it holds, again
    assert pair.announced("s") is None
    assert isinstance(pair.announce("b2", 0, root=7), Refused)
    pair.announce("b2", 0)
    assert pair.announced("s") == (2, 0)
    pair.announce("a", 1)
    pair.announce("b2", 1)
    assert pair.announced("s") == (2, 1)


def test_a_rank_whose_lease_lapsed_comes_back_to_its_epoch(pair):
    pair.announce("b", 0)
    pair.wait(5, "a", "s")
    assert pair.last("b", Fenced).rejoin
    assert pair.last("s", RunState).publisher == "lost"
    pair.announce("a", 0)
    assert pair.announced("s") is None  # its rank is not there to serve it
    assert pair.rank("b", 1, 2, "job", layout=half(1), known=(1, -1)).epoch == 1
    assert pair.last("s", RunState).publisher == "alive"
    assert pair.announced("s") == (1, 0)
    assert len(pair.last("s", RunState).sources) == 2


def test_a_lost_rank_is_no_source_and_the_others_still_are(pair):
    pair.announce("a", 0)
    pair.announce("b", 0)
    pair.wait(5, "a", "s")
    state = pair.last("s", RunState)
    assert (state.publisher, state.announcement.version) == ("lost", 0)
    assert [source.rank for source in state.sources] == [0]


def test_a_rank_that_slept_does_not_take_its_place_back_from_its_successor(pair):
    pair.wait(5, "a", "s")
    assert pair.rank("b2", 1, 2, "job", layout=half(1)).epoch == 2
    refused = pair.rank("b", 1, 2, "job", layout=half(1), known=(1, -1))
    assert isinstance(refused, Refused)
    assert refused.code == "evicted"
    assert pair.last("b2", Fenced) is None


def test_a_gang_that_slept_does_not_take_the_run_back_from_its_successor(pair):
    pair.wait(5, "s")
    assert pair.rank("c", layout=WHOLE).epoch == 2
    for index, who in enumerate("ab"):
        reply = pair.rank(who, index, 2, "job", layout=half(index), known=(1, -1))
        assert isinstance(reply, Refused)
    pair.leave("c")
    assert isinstance(pair.rank("a", 0, 2, "job", layout=half(0), known=(1, -1)), Refused)


def test_subscribers_are_measured_when_the_gang_is_complete(talk):
    said = talk()
    said.rank("a", 0, 2, "job", layout=half(0))
    for name, layout in [("whole", WHOLE), ("half", half(1))]:
        assert isinstance(said.join(name, "subscriber", layout=layout), Joined)
    wide = Layout((TensorSpec("w", (5, 2), "float32"),))
    assert isinstance(said.join("wide", "subscriber", layout=wide), Joined)
    said.rank("b", 1, 2, "job", layout=half(1))
    assert said.last("wide", Fenced).code == "layout"
    for name in ("whole", "half"):
        assert said.last(name, Fenced) is None
    assert isinstance(said.join("late", "subscriber", layout=wide), Refused)


def test_a_gang_that_lacks_a_part_of_the_model_fences_who_needs_it(talk):
    said = talk()
    said.join("s", "subscriber", layout=WHOLE)
    for index in range(2):
        said.rank(f"p{index}", index, 2, "job", layout=half(0))
    fenced = said.last("s", Fenced)
    assert (fenced.code, fenced.detail["tensor"]) == ("layout", "w")
