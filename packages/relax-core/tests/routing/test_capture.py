"""The transformers engine tells where every token went, once, when it first saw it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from agentic import Generation, GenerationRequest
from relax.backends.inference.batch import RunningBatch
from relax.backends.inference.errors import EngineError
from relax.backends.inference.network import Network
from relax.backends.inference.transformers_engine import TransformersEngine
from relax.backends.routes import check
from relax.backends.tiny import write_tiny

Batches = Callable[..., RunningBatch]


@pytest.fixture
def start(folder, weights) -> Batches:
    """A running batch that serves version 0."""

    def make(slots: int = 8, capture: bool = True, dtype: str = "float32") -> RunningBatch:
        network = Network(
            folder,
            dtype=dtype,
            device="cpu",
            slots=slots,
            capacity=None,
            weights=False,
            seed=0,
            capture=capture,
        )
        network.load({name: tensor.to(network.layout[name].dtype) for name, tensor in weights(0).items()})
        return RunningBatch(network, slots, 0)

    return make


@torch.inference_mode()
def _serve(
    batch: RunningBatch, requests: list[GenerationRequest], steps: int = 1000
) -> dict[str, Generation]:
    """Admit as slots allow, and step until all are done or the steps are up."""
    waiting, done = list(requests), {}
    for _ in range(steps):
        if waiting and batch.free:
            admitted, waiting = waiting[: batch.free], waiting[batch.free :]
            finished = batch.admit(admitted)
        elif len(batch):
            finished = batch.step()
        else:
            break
        done.update({one.id: one.generation for one in finished})
    return done


def _all(request: GenerationRequest, generation: Generation) -> np.ndarray:
    return np.concatenate([request.tokens, generation.tokens])


def test_every_token_but_the_last_has_the_route_that_plain_transformers_gives_it(
    start, make_request, oracle, weights, routing
):
    # Rows of many lengths in few slots: they come, move and go all the time; some sample one token only.
    requests = [
        make_request(f"r{n}", seed=n, length=2 + 5 * (n % 4), max_new_tokens=1 + (7 * n) % 40)
        for n in range(17)
    ]

    found = _serve(start(slots=4), requests)

    assert len(found) == 17
    for request in requests:
        generation, tokens = found[request.id], _all(request, found[request.id])
        check(generation.routes, routing, len(tokens))
        assert np.array_equal(_routes(generation), oracle.routes(weights(0), tokens)), request.id


def test_a_long_generation_keeps_every_route(start, make_request, oracle, weights):
    request = make_request("long", seed=5, max_new_tokens=150)

    generation = _serve(start(), [request])["long"]

    assert len(generation.tokens) == 150
    assert np.array_equal(_routes(generation), oracle.routes(weights(0), _all(request, generation)))


def test_rows_with_one_prompt_each_get_its_routes(start, make_request, oracle, weights):
    one = make_request("r0", seed=1, max_new_tokens=6)
    twins = [GenerationRequest(f"r{n}", one.tokens, one.sampling, seed=n) for n in range(4)]

    found = _serve(start(), twins)

    for name, generation in found.items():
        assert np.array_equal(
            _routes(generation), oracle.routes(weights(0), _all(twins[int(name[1:])], generation))
        )
    assert len({_routes(generation).tobytes() for generation in found.values()}) == 4


@torch.inference_mode()
def test_a_recomputation_leaves_the_routes_of_the_first_time(start, make_request, oracle, weights):
    requests = [make_request(f"r{n}", seed=n, length=4 + 3 * n, max_new_tokens=20 + n) for n in range(3)]
    batch = start()
    _serve(batch, requests, steps=8)
    before = {request.id: batch._routes.of(row) for row, request in enumerate(batch.requests)}

    batch._network.load(weights(1))
    assert batch.commit(1) == 3
    found = _serve(batch, [])

    changed = 0
    for request in requests:
        generation, tokens = found[request.id], _all(request, found[request.id])
        kept = before[request.id]
        assert len(kept) == len(request.tokens) + 7
        assert np.array_equal(_routes(generation)[: len(kept)], kept)
        assert np.array_equal(kept, oracle.routes(weights(0), tokens)[: len(kept)])
        changed += int((kept != oracle.routes(weights(1), tokens)[: len(kept)]).sum())
        assert [span[0] for span in generation.spans] == [0, 1]
    assert changed > 50, "the versions have to route differently, or nothing is shown"


@torch.inference_mode()
def test_a_recomputation_follows_the_routes_of_the_first_time(start, make_request, weights, trained_folder):
    """What is sampled after it is then what a trainer that follows the same routes computes."""
    from relax.backends.train.base import Packed
    from relax.backends.train.settings import TrainerSettings
    from relax.backends.train.torch_native import TorchNative

    requests = [make_request(f"r{n}", seed=n, length=4 + 3 * n, max_new_tokens=20) for n in range(3)]
    batch = start()
    _serve(batch, requests, steps=8)
    batch._network.load(weights(1))
    batch.commit(1)
    found = _serve(batch, [])
    trainer = TorchNative(trained_folder, settings=TrainerSettings(lr=1e-3))
    for name, tensor in trainer.tensors():
        tensor.copy_(weights(1)[name])

    for request in requests:
        generation, tokens = found[request.id], _all(request, found[request.id])
        routes = np.full((len(tokens), *_routes(generation).shape[1:]), -1, np.int16)
        routes[:-1] = _routes(generation)
        packed = Packed(
            tokens=torch.from_numpy(tokens.astype(np.int64)),
            offsets=torch.tensor([0, len(tokens)]),
            prompt_lengths=torch.tensor([len(request.tokens)]),
            routes=torch.from_numpy(routes),
        )
        _, start_at, end = generation.spans[1]
        gap = trainer.forward(packed).numpy()[start_at:end] - generation.logprobs[start_at:end]
        assert np.abs(gap).max() < 1e-4


def test_capturing_changes_no_token(start, make_request):
    requests = [make_request(f"r{n}", seed=n, length=3 + 4 * n, max_new_tokens=30) for n in range(5)]

    with_routes, without = (_serve(start(capture=capture), requests) for capture in (True, False))

    for name, generation in without.items():
        assert generation.routes is None
        assert with_routes[name].tokens.tolist() == generation.tokens.tolist()
        assert np.abs(with_routes[name].logprobs - generation.logprobs).max() < 1e-5


@torch.inference_mode()
def test_an_aborted_row_has_the_routes_of_what_it_sampled(start, make_request, oracle, weights):
    batch = start()
    request = make_request("cut", seed=3, max_new_tokens=100)
    _serve(batch, [request, make_request("other", seed=4, max_new_tokens=100)], steps=6)

    generation = batch.abort("cut").generation

    assert generation.finish_reason == "abort"
    assert len(generation.tokens) == 6
    assert np.array_equal(_routes(generation), oracle.routes(weights(0), _all(request, generation)))


async def test_an_engine_of_a_run_tells_routes_when_asked(trained_folder, make_request, oracle, weights):
    engine = TransformersEngine(trained_folder, version=0, capture_routes=True)
    request = make_request("r", seed=2)
    try:
        (one,) = [found async for found in engine.generate([request])]
    finally:
        await engine.close()

    tokens = _all(request, one.generation)
    assert _routes(one.generation).dtype == np.uint8
    assert np.array_equal(_routes(one.generation), oracle.routes(weights(0), tokens))


def test_a_dense_model_has_no_routes_to_tell(tmp_path):
    with pytest.raises(EngineError, match=r"model type 'qwen3' .* is dense.*actor.routing_replay=false"):
        TransformersEngine(write_tiny(tmp_path), capture_routes=True)


def _routes(generation: Generation) -> np.ndarray:
    assert generation.routes is not None
    return generation.routes
