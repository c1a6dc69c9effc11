"""What a run says of the engines it lost."""

from relax.ops.engine_losses import EngineLosses


def test_losses_and_returns_are_noted_and_added_up() -> None:
    losses = EngineLosses()
    assert losses.summary == ""
    reason = "the engine's compute thread failed:\nTraceback ...\nRuntimeError: out of memory\n"
    lost = {"event": "engine lost", "engine": "engine-1", "reason": reason, "requests": 3, "seconds": 0.25}
    assert losses.note(lost) == (
        "engine-1 was lost 250 ms after it was last heard: RuntimeError: out of memory; its 3 requests go to "
        "others"
    )
    assert losses.note({"event": "engine back", "engine": "engine-1", "version": 7, "seconds": 9.0}) == (
        "engine-1 is back after 9.0 s, at version 7"
    )
    assert losses.note({**lost, "engine": "engine-0", "requests": 0}) == (
        "engine-0 was lost 250 ms after it was last heard: RuntimeError: out of memory"
    )
    assert losses.note({"event": "engine given up", "engine": "engine-0", "reason": "killed"}) == (
        "engine-0 is not started again: killed"
    )
    assert losses.note({"event": "checkpoint"}) is None
    losses.asked_again = 3
    assert losses.summary == (
        "lost engine-0 (1x), engine-1 (1x); back 1x, after 9.0 s at most; not started again: engine-0; "
        "3 requests were asked again"
    )
