"""Several processes and one store: joining, leaving, dying, and doing without torch."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import transferqueue.compat.transfer_queue as tq
from transferqueue import Full
from transferqueue.compat.transfer_queue import client as client_module
from transferqueue.compat.transfer_queue import messages
from transferqueue.compat.transfer_queue.link import Link
from transferqueue.compat.transfer_queue.session import ADDRESS
from transferqueue.errors import Unauthorized

ONE_UNIT = {"SimpleStorage": {"num_data_storage_units": 1}}
Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def shared() -> Iterator[None]:
    """The store of this module; tests that need one of their own come last."""
    tq.init({"controller": {"polling_mode": True}, "backend": ONE_UNIT})
    yield
    tq.close()


@pytest.fixture
def client(shared: None) -> Iterator[tq.TransferQueueClient]:
    yield tq.get_client()
    for name in tq.get_client().get_partition_list():
        tq.get_client().clear_partition(name)


@pytest.fixture
def alone() -> Iterator[None]:
    """No store before and none after."""
    tq.close()
    yield
    tq.close()
    assert ADDRESS not in os.environ


@pytest.fixture
def run() -> Iterator[Run]:
    """Starts a program, which ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str, **environment: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(10)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def put(client: tq.TransferQueueClient, count: int) -> list[int]:
    """New samples of the partition "p"; their indexes."""
    return client.put({"x": np.arange(count)}, partition_id="p").global_indexes


def take(client: tq.TransferQueueClient, count: int = 2) -> list[int]:
    return client.get_meta(["x"], count, "p", task_name="t").global_indexes


def consumed(client: tq.TransferQueueClient) -> bytes:
    return client._link.call(messages.Consumption("p", "t"), messages.Status).states


TAKE = """
    import sys
    import transferqueue.compat.transfer_queue as tq

    tq.init()
    client = tq.get_client()
    for _ in range({batches}):
        print(client.get_meta(["x"], 2, "p", task_name="t").global_indexes, flush=True)
    sys.stdin.readline()
    tq.close()
"""


def test_a_process_joins_the_store_that_the_environment_names(client: tq.TransferQueueClient, run: Run):
    process = run(
        """
        import numpy as np
        import transferqueue.compat.transfer_queue as tq

        config = tq.init({"controller": {"polling_mode": False}})
        tq.kv_batch_put(["a", "b"], "p", {"x": np.arange(2)}, tags=[{"v": 1}, {"v": 2}])
        print(config.controller.polling_mode, config.controller.zmq_info.address, tq.kv_list())
        tq.close()
        """
    )
    address = client.config.controller.zmq_info.address
    assert said(process) == f"True {address} {{'p': {{'a': {{'v': 1}}, 'b': {{'v': 2}}}}}}"
    assert process.wait(30) == 0
    assert tq.kv_list("p")["p"]["b"] == {"v": 2}, "what a process wrote stays when it leaves"


def test_a_process_that_joined_does_not_end_the_store(client: tq.TransferQueueClient, run: Run):
    process = run(
        """
        import transferqueue.compat.transfer_queue as tq
        print(tq.init({"address": input()}).controller.polling_mode)
        tq.close()
        """,
        **{ADDRESS: "tcp://127.0.0.1:1"},  # what is handed to init counts more
    )
    out, _ = process.communicate(client.config.controller.zmq_info.address + "\n", timeout=30)
    assert (out, process.returncode) == ("True\n", 0)
    assert tq.kv_list() == {}


def test_the_last_batch_of_a_killed_consumer_returns(
    client: tq.TransferQueueClient, run: Run, eventually: Callable[..., None]
):
    every = put(client, 6)
    process = run(TAKE.format(batches=2))
    assert (said(process), said(process)) == (str(every[:2]), str(every[2:4]))
    assert take(client) == every[4:]
    assert take(client) == []
    assert client.check_consumption_status("t", "p")
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    eventually(lambda: not client.check_consumption_status("t", "p"))
    assert take(client) == every[2:4], "it had asked for more after the first, and so was through with them"


def test_a_consumer_that_leaves_in_order_keeps_what_it_took(client: tq.TransferQueueClient, run: Run):
    every = put(client, 4)
    process = run(TAKE.format(batches=1))
    assert said(process) == str(every[:2])
    process.communicate("\n", timeout=30)
    assert process.returncode == 0
    assert (take(client), take(client)) == (every[2:], [])


def test_a_child_of_a_fork_joins_by_itself(client: tq.TransferQueueClient):
    every = put(client, 2)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            assert tq.get_client() is not client
            os.write(writing, str(take(tq.get_client())).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with os.fdopen(reading) as pipe:
        assert pipe.read() == str(every)


def test_bytes_that_are_no_request_end_their_connection_and_nothing_else(client: tq.TransferQueueClient):
    host, port = client.config.controller.zmq_info.address.removeprefix("tcp://").split(":")
    bad_message = (3).to_bytes(4, "little") + b"\xc1\xc1\xc1"
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, bad_message, b"\1"):
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
    assert client.get_partition_list() == []


def test_a_closed_client_says_so(client: tq.TransferQueueClient):
    other = tq.TransferQueueClient("other", client.config.controller.zmq_info)
    other.close()
    other.close()
    with pytest.raises(tq.CatalogLost, match="closed"):
        other.get_partition_list()


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"controller": {"sampler": "NoSuch"}}, "no sampler 'NoSuch'"),
        ({"controller": {"sampler": 3}}, "is a int"),
        ({"controller": {"settle": "never"}}, "controller.settle is 'never'"),
        ({"controller": 3}, "controller is 3"),
        ({"backend": {"storage_backend": "MooncakeStore"}}, "MooncakeStore"),
        ({"address": "nonsense"}, "no address"),
    ],
)
def test_settings_that_cannot_be_are_refused(alone: None, conf: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        tq.init(conf)


def test_init_is_idempotent_and_close_ends_what_it_started(alone: None):
    config = tq.init({"backend": ONE_UNIT})
    client = tq.get_client()
    assert tq.init() is config
    assert tq.get_client() is client
    address = os.environ[ADDRESS]
    tq.close()
    tq.close()
    with pytest.raises(tq.NotInitialized, match="call init"):
        tq.kv_list()
    with pytest.raises(RuntimeError, match="did the process that called"):
        tq.init({"address": address})


def test_a_store_with_a_token_lets_only_those_in_who_have_it(alone: None):
    config = tq.init({"token": "secret", "backend": ONE_UNIT})
    assert "secret" not in str({**config, "controller": None})
    for wrong in (None, "guess"):
        with pytest.raises(Unauthorized, match="token"):
            Link(config.controller.zmq_info.address, wrong)
    other = tq.TransferQueueClient("other", config.controller.zmq_info)
    assert other.get_partition_list() == []
    other.close()
    assert os.environ["TRANSFER_QUEUE_TOKEN"] == "secret", "for the processes that this one starts"


def test_limits_of_the_store_hold(alone: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client_module, "_PUT_SECONDS", 0.1)
    tq.init({"backend": {"SimpleStorage": {"total_storage_size": 3, "num_data_storage_units": 1}}})
    client = tq.get_client()
    put(client, 2)
    with pytest.raises(Full):
        put(client, 2)
    client.clear_partition("p")
    put(client, 3)


def test_with_acks_everything_that_is_not_acked_returns(
    alone: None, run: Run, eventually: Callable[..., None]
):
    tq.init({"controller": {"polling_mode": True, "settle": "ack"}, "backend": ONE_UNIT})
    client = tq.get_client()
    put(client, 6)
    process = run(
        """
        import sys
        import transferqueue.compat.transfer_queue as tq

        client = tq.get_client()
        metas = [client.get_meta(["x"], 2, "p", task_name="t") for _ in range(3)]
        client.ack(metas[1], "t")
        print("acked", flush=True)
        sys.stdin.readline()
        """
    )
    assert said(process) == "acked"
    process.kill()
    process.wait(10)
    eventually(lambda: consumed(client) == b"\0\0\1\1\0\0")
    assert (take(client), take(client)) == ([0, 1], [4, 5])


def test_everything_but_tensors_works_without_torch_and_ray(alone: None, run: Run):
    process = run(
        """
        import sys

        for name in ("torch", "ray", "tensordict", "omegaconf"):
            sys.modules[name] = None  # an import of it raises

        import numpy as np
        import transferqueue.compat.transfer_queue as tq

        tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
        meta = tq.kv_batch_put(["a", "b"], "p", {"x": [[1, 2], "text"]}, tags=[{"v": 1}, {}])
        client = tq.get_client()
        batch = client.put({"y": np.zeros((3, 2), np.float32)}, partition_id="p")
        taken = client.get_meta(["y"], 3, "p", task_name="t")
        print(meta.fields, tq.kv_list(), taken.field_schema, client.check_consumption_status("t", "p"))
        for call in (
            lambda: client.get_data(taken),
            lambda: tq.kv_batch_get("a", "p"),
            lambda: client.get_consumption_status("t", "p"),
            lambda: tq.StreamingDataset,
        ):
            try:
                call()
            except ImportError as error:
                assert "relax-transferqueue[torch]" in str(error), error
            else:
                raise AssertionError("a call handed out tensors without torch")
        client.clear_samples(batch)
        tq.kv_clear(["a", "b"], "p")
        tq.close()
        print("done")
        """
    )
    assert said(process) == (
        "['x'] {'p': {'a': {'v': 1}, 'b': {}}} {'y': {'dtype': 'float32', 'shape': (2,), 'is_nested': False, "
        "'is_non_tensor': False}} False"
    )
    assert said(process) == "done"
    assert process.wait(30) == 0
