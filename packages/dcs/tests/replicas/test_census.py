"""Which steps are complete, and what may go."""

from dcs.replicas.census import Census, missing_text, take
from dcs.replicas.messages import AttemptRecord, Choice, Floor, Inventory, Place, StepRecord
from hypothesis import given
from hypothesis import strategies as st


def record(session: str, number: int, world_size: int, **steps: tuple[int, ...]) -> AttemptRecord:
    held = tuple(StepRecord(int(step[1:]), ranks) for step, ranks in steps.items())
    return AttemptRecord(session, number, world_size, held)


def census(**keepers: tuple[AttemptRecord, ...]) -> Census:
    return take({name: Inventory(1, records) for name, records in keepers.items()})


def test_a_step_is_complete_over_all_keepers_together():
    seen = census(
        a=(record("s", 1, 3, s4=(0, 1), s5=(0,)),),
        b=(record("s", 1, 3, s4=(2,), s5=(2, 0)),),
    )
    newest = seen.newest_complete()
    assert newest is not None
    assert newest.place == Place(1, 4, "s")
    assert newest.holders == {0: {"a"}, 1: {"a"}, 2: {"b"}}
    assert missing_text(seen.find("s", 5), 3) == "1"
    assert missing_text(None, 3) == "0, 1, 2"


def test_shards_of_two_attempts_never_make_a_step():
    seen = census(a=(record("old", 1, 2, s7=(0,)), record("new", 2, 2, s7=(1,))))
    assert seen.newest_complete() is None


def test_a_later_attempt_is_newer_whatever_its_step():
    seen = census(a=(record("old", 1, 1, s9=(0,)), record("new", 2, 1, s3=(0,))))
    assert [step.place.step for step in seen.steps] == [3, 9]


def test_where_keepers_disagree_on_a_number_the_greatest_wins():
    seen = census(
        a=(record("s", 5, 2, s1=(0,)), record("t", 8, 2)),
        b=(record("s", 9, 2, s1=(1,)),),
    )
    assert seen.numbers == {"s": 9, "t": 8}
    newest = seen.newest_complete()
    assert newest is not None
    assert newest.place == Place(9, 1, "s")


def test_choices_are_by_session():
    chosen = AttemptRecord("s", 1, 2, (), Choice(Place(1, 4, "s")))
    assert take({"a": Inventory(1, (chosen,))}).choices == {"s": Choice(Place(1, 4, "s"))}


def test_as_many_complete_steps_stay_as_asked_for():
    seen = census(
        a=(record("s", 1, 1, s1=(0,), s2=(0,), s3=(0,)),), b=(record("s", 1, 1, s1=(0,), s2=(0,), s3=(0,)),)
    )
    assert seen.floor(keep=2, copies=2) == Floor(Place(1, 2, "s"), Place(1, 3, "s"))
    assert seen.floor(keep=4, copies=2) is None


def test_the_newest_step_with_all_copies_stays_while_newer_ones_have_fewer():
    seen = census(a=(record("s", 1, 1, s1=(0,), s2=(0,), s3=(0,)),), b=(record("s", 1, 1, s1=(0,)),))
    assert seen.floor(keep=1, copies=2) == Floor(Place(1, 3, "s"), Place(1, 1, "s"))


ranks = st.frozensets(st.integers(0, 2), max_size=3).map(lambda found: tuple(sorted(found)))
records = st.builds(
    lambda number, steps: AttemptRecord(
        f"s{number}", number, 3, tuple(StepRecord(step, held) for step, held in sorted(steps.items()))
    ),
    st.integers(1, 3),
    st.dictionaries(st.integers(0, 5), ranks, max_size=5),
)
inventories = st.lists(records, max_size=3, unique_by=lambda one: one.number).map(tuple)


@given(st.dictionaries(st.sampled_from("abc"), inventories, max_size=3), st.integers(1, 3), st.integers(1, 3))
def test_a_floor_leaves_the_newest_complete_steps_and_one_with_all_copies(held, keep, copies):
    seen = census(**held)
    complete = [step for step in seen.steps if step.complete]
    floor = seen.floor(keep, copies)
    if floor is None:
        assert len(complete) < keep
        return
    assert complete == sorted(complete, key=lambda step: step.place, reverse=True)
    stays = [step for step in complete if step.place >= floor.oldest or step.place == floor.anchor]
    assert stays[:keep] == complete[:keep]
    assert len([step for step in complete if step.place >= floor.oldest]) == keep
    copied = [step for step in complete if all(len(who) >= copies for who in step.holders.values())]
    assert (floor.anchor is None) == (not copied)
    assert not copied or floor.anchor == copied[0].place
