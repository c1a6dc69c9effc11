"""Workers of a Ray job find the store by themselves."""

import os

import pytest
import transferqueue.compat.transfer_queue as tq

pytestmark = pytest.mark.slow


def work(number: int) -> tuple[str, list[str]]:
    """Runs in a Ray worker, whose environment names no store."""
    import transferqueue.compat.transfer_queue as tq

    address = tq.init().controller.zmq_info.address
    tq.kv_batch_put([f"key-{number}"], "p", {"x": [[number]]}, tags=[{"by": number}])
    keys = list(tq.kv_list("p")["p"])
    tq.close()
    return address, keys


def test_the_first_process_of_a_ray_job_starts_the_store_and_the_others_find_it():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    try:
        config = tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
        answers = ray.get([ray.remote(work).remote(number) for number in range(3)], timeout=60)
        assert {address for address, _ in answers} == {config.controller.zmq_info.address}
        assert sorted(tq.kv_list("p")["p"]) == ["key-0", "key-1", "key-2"], "who leaves ends nothing"
        tq.close()
        again = tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
        assert again.controller.zmq_info.address != config.controller.zmq_info.address
        assert tq.kv_list() == {}
    finally:
        tq.close()
        ray.shutdown()
    assert tq.session.ADDRESS not in os.environ
