from hypothesis import given
from hypothesis import strategies as st
from relax.engine.checkpoints import Trained


@given(st.sets(st.integers(0, 40)))
def test_next_and_returned_say_exactly_what_is_left(ordinals: set[int]) -> None:
    trained = Trained()
    trained.add(ordinals)
    state = trained.state()
    left = set(range(state["next"])) - set(state["returned"])
    assert left == ordinals
    again = Trained.of_state(state)
    assert again.state() == state
