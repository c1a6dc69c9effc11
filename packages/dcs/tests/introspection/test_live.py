"""What is shown of members that are really there."""

import json

import torch
from dcs.cli import main
from dcs.introspection import IntrospectionServer


def test_a_version_is_followed_from_its_announcement_to_the_last_ack(
    coordinator, publish_to, subscribe, serve, stack, get, eventually, capsys
):
    http = stack.enter_context(IntrospectionServer(coordinator))
    tensors = {"w": torch.arange(50_000, dtype=torch.float32)}
    publisher = publish_to(tensors)
    receivers = [subscribe(tensors, f"engine-{place}", wires=("tcp",)) for place in range(2)]

    def run() -> dict:
        (only,) = json.loads(get(http, "/topology?run=r")[1])["runs"]
        return only

    def by_name() -> dict[str, dict]:
        return {one["name"]: one for one in run()["subscribers"]}

    eventually(lambda: len(by_name()) == 2)
    assert run()["publisher"] == "alive"
    assert [rank["state"] for rank in run()["ranks"]] == ["alive"]
    ticket = publisher.publish(4, tensors)
    staged = [receiver.next(timeout=20) for receiver in receivers]
    eventually(lambda: [one["staged"] for one in by_name().values()] == [4, 4])
    assert {one["acked"] for one in by_name().values()} == {-1}
    assert {one["lag"] for one in by_name().values()} == {1}
    for one in staged:
        assert one is not None
        one.ack(pause_seconds=0.125)
    ticket.wait(20)
    eventually(lambda: [one["acked"] for one in by_name().values()] == [4, 4])
    seen = by_name()
    assert {one["lag"] for one in seen.values()} == {0}
    assert {one["nbytes"] for one in seen.values()} == {200_000}
    assert {one["wire"] for one in seen.values()} == {"tcp"}
    assert all(one["from_ranks"] + one["from_peers"] >= 200_000 for one in seen.values())
    assert all(one["sources"] for one in seen.values())
    (version,) = json.loads(get(http, "/versions")[1])["runs"][0]["versions"]
    assert (version["version"], version["nbytes"]) == (4, 200_000)
    assert version["complete_at"] >= version["announced_at"]
    for delivery in version["deliveries"]:
        assert 0 <= delivery["staged_seconds"] <= delivery["acked_seconds"] < 60
        assert delivery["transfer_seconds"] > 0
        assert delivery["pause_seconds"] == 0.125
    assert main(["top", http.url, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "epoch 1   version 4   1 of 1 rank, publisher alive   2 subscribers" in shown
    assert "125.0 ms" in shown
    receivers[1].close()
    eventually(lambda: set(by_name()) == {"engine-0"})
    assert [gone["name"] for gone in run()["departed"]] == ["engine-1"]
    publisher.close()
    eventually(lambda: run()["publisher"] == "absent")


def test_a_bar_follows_a_transfer(publish_to, subscribe):
    seen: list[tuple[int, int, int]] = []
    tensors = {"w": torch.arange(1_000_000, dtype=torch.float32)}
    receiver = subscribe(tensors, wires=("tcp",), progress=lambda *so_far: seen.append(so_far))
    publish_to(tensors).publish(1, tensors)
    assert torch.equal(receiver.fetch(1, timeout=20)["w"], tensors["w"])
    assert seen[-1] == (4_000_000, 4_000_000, 1)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
