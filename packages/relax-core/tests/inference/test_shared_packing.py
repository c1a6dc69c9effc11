"""What is made of the arrays that requests share: once, by whichever comes first, as long as they live."""

import gc
import threading

import numpy as np
import pytest
from relax.backends.inference.sglang.sharing import Shared


def test_threads_that_come_at_once_wait_for_one():
    shared, array, made, found = Shared(), np.zeros(3), [], []
    go_on = threading.Event()

    def make():
        made.append(threading.get_ident())
        assert go_on.wait(20)
        return object()

    threads = [threading.Thread(target=lambda: found.append(shared.of([array], make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert len(made) == 1
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_all_arrays_count_and_what_is_gone_is_forgotten():
    shared, one, two, three = Shared(), np.zeros(1), np.zeros(1), np.zeros(1)
    first = shared.of([one, two], lambda: "a")
    assert shared.of([one, three], lambda: "b") == "b"
    assert shared.of([one, two], lambda: "c") is first
    assert len(shared) == 2
    del two
    gc.collect()
    assert len(shared) == 1
    del one
    gc.collect()
    assert not len(shared)


def test_a_failure_is_its_own_and_the_next_one_tries():
    shared, array = Shared(), np.zeros(1)

    def fail():
        raise ValueError("of request 'a'")

    with pytest.raises(ValueError, match="request 'a'"):
        shared.of([array], fail)
    assert shared.of([array], lambda: "made") == "made"

    begun, go_on, found = threading.Event(), threading.Event(), []

    def slow():
        begun.set()
        assert go_on.wait(20)
        raise ValueError("of request 'b'")

    other = np.zeros(1)

    def first():
        with pytest.raises(ValueError, match="'b'"):
            shared.of([other], slow)

    threads = [threading.Thread(target=first)]
    threads[0].start()
    assert begun.wait(20)
    threads.append(threading.Thread(target=lambda: found.append(shared.of([other], lambda: "anew"))))
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert found == ["anew"]
