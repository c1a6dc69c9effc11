"""A coordinator that was restarted, or that hears of a former one: what its members know counts."""

from dcs.control.messages import Announced, Fenced, Joined, Refused
from dcs.layout import Layout, TensorSpec

LAYOUT = Layout((TensorSpec("w", (2,), "float32"),))


def test_epochs_and_versions_go_on_where_the_members_know_of(talk):
    said = talk()
    said.join("s", "subscriber", known=(4, 9))
    joined = said.rank("p", known=(4, 9))
    assert (joined.epoch, joined.version, joined.root) == (5, 9, b"")
    assert isinstance(said.announce("p", 8), Refused)
    assert isinstance(said.announce("p", 9, root=77), Announced)  # its root is not known any more
    assert said.announced("s") == (5, 9)
    assert isinstance(said.announce("p", 9, root=78), Refused)
    assert isinstance(said.announce("p", 10), Announced)


def test_a_subscriber_that_knows_more_moves_the_publisher_on(talk):
    said = talk()
    assert said.rank("p").epoch == 1
    said.announce("p", 3)
    said.join("s", "subscriber", known=(6, 12))
    assert said.last("p", Fenced).rejoin
    assert said.announced("s") is None
    joined = said.rank("p", known=(1, 3))
    assert (joined.epoch, joined.version) == (7, 12)
    assert isinstance(said.announce("p", 3), Refused)
    assert isinstance(said.announce("p", 13), Announced)
    assert said.announced("s") == (7, 13)


def test_the_ranks_of_a_gang_move_together(talk):
    said = talk()
    assert said.rank("a", 0, 2, "job", known=(3, 5)).epoch == 4
    assert said.rank("b", 1, 2, "job", known=(5, 8)).epoch == 6  # it was in a newer one
    assert said.last("a", Fenced).rejoin
    again = said.rank("a", 0, 2, "job", known=(4, 5))
    assert (again.epoch, again.version) == (6, 8)


def test_a_stale_publisher_is_refused_when_it_comes_after_the_true_one(talk):
    said = talk()
    assert said.rank("true", known=(9, 12)).epoch == 10
    stale = said.rank("stale", known=(3, 7))
    assert isinstance(stale, Refused)
    assert stale.code == "evicted"
    assert said.last("true", Fenced) is None


def test_a_stale_publisher_is_fenced_when_the_true_one_comes_after_it(talk):
    said = talk()
    assert said.rank("stale", known=(3, 7)).epoch == 4
    said.announce("stale", 8)
    joined = said.rank("true", known=(9, 12))
    assert (joined.epoch, joined.version) == (10, 12)
    assert not said.last("stale", Fenced).rejoin


def test_a_newly_started_publisher_is_the_true_one(talk):
    said = talk()
    assert said.rank("new").epoch == 1
    assert isinstance(said.rank("old", known=(9, 12)), Refused)
    assert said.last("new", Fenced).rejoin  # to an epoch above what was seen
    joined = said.rank("new", known=(1, -1))
    assert (joined.epoch, joined.version) == (10, 12)
    assert isinstance(said.rank("older", known=(9, 12)), Refused)


def test_of_two_subscribers_of_a_name_the_one_that_knows_more_stays(talk):
    said = talk()
    said.join("stale", "subscriber", "e", known=(3, 7))
    assert isinstance(said.join("true", "subscriber", "e", known=(3, 8)), Joined)
    assert not said.last("stale", Fenced).rejoin
    assert isinstance(said.join("other", "subscriber", "e", known=(3, 7)), Refused)


def test_what_a_member_staged_counts_again_only_in_an_epoch_of_the_same_bits(talk):
    said = talk()
    said.rank("p", known=(4, 9))
    for who in "st":
        said.join(who, "subscriber", known=(4, 9))
    said.stage("s", 9, epoch=4)
    said.announce("p", 9)
    said.beat("t")
    assert not any(
        source.name == "s" for source in said.registry.snapshot(0, 0, 0).runs[0].subscribers[1].sources
    )
    said.stage("s", 9, epoch=5)
    said.leave("p")
    assert said.announced("t") == (5, 9)


def test_what_was_staged_counts_in_the_next_epoch_of_the_same_coordinator(talk):
    said = talk()
    said.rank("p")
    for who in "st":
        said.join(who, "subscriber")
    said.announce("p", 9)
    said.stage("s", 9)
    said.rank("q")
    said.announce("q", 9)
    said.leave("q")
    assert said.announced("t") == (2, 9)  # as s has it
