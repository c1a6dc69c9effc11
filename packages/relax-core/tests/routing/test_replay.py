"""torch_native sends every token where its routes say, in whatever layout, and its routers train."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from agentic import Generation
from relax.algorithms.spec import LossInputs, LossOutputs
from relax.backends.inference.transformers_engine import TransformersEngine
from relax.backends.routes import Routing
from relax.backends.tiny import write_tiny
from relax.backends.train.base import Packed
from relax.backends.train.errors import BatchError
from relax.backends.train.gang.rounds import cut
from relax.backends.train.settings import TrainerSettings
from relax.backends.train.shared_prompts import fold
from relax.backends.train.torch_native import TorchNative
from relax.backends.train.torch_native.trainer import NativeOptions
from torch import Tensor

SETTINGS = TrainerSettings(lr=1e-3, temperature=0.8)

Row = tuple[np.ndarray, int, np.ndarray]
"""Tokens, prompt length, routes [tokens - 1, layers, top_k]."""


def batch_of(rows: Sequence[Row]) -> Packed:
    tokens = np.concatenate([row[0] for row in rows]).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum([len(row[0]) for row in rows])])
    routes = np.full((len(tokens), *rows[0][2].shape[1:]), -1, np.int16)
    for start, row in zip(offsets, rows, strict=False):
        routes[start : start + len(row[2])] = row[2]
    responses = len(tokens) - sum(row[1] for row in rows)
    return Packed(
        tokens=torch.from_numpy(tokens),
        offsets=torch.from_numpy(offsets),
        prompt_lengths=torch.tensor([row[1] for row in rows]),
        fields={
            "loss_mask": torch.ones(responses, dtype=torch.uint8),
            "rollout_logprobs": torch.zeros(responses),
            "advantages": torch.linspace(-1, 1, responses),
        },
        routes=torch.from_numpy(routes),
    )


def random_rows(routing: Routing, shapes: Sequence[tuple[int, int, int]], seed: int = 0) -> list[Row]:
    """Rows of (prompt name, prompt length, response length); routes that no router would choose. Equal names
    have equal prompts; the sign of a name says whether they have equal routes in them, too.
    """
    rows = []
    for index, (name, prompt, response) in enumerate(shapes):
        own, shared = np.random.default_rng((seed, index)), np.random.default_rng((seed, 99, abs(name)))
        tokens = np.concatenate([shared.integers(7, 100, prompt), own.integers(7, 100, response)])
        before, after = _routes(routing, prompt, shared if name > 0 else own), _routes(routing, response, own)
        rows.append((tokens, prompt, np.concatenate([before, after])[:-1]))
    return rows


def _routes(routing: Routing, tokens: int, random: np.random.Generator) -> np.ndarray:
    scores = random.random((tokens, len(routing.layers), routing.experts))
    return np.argsort(scores, axis=-1)[..., : routing.top_k].astype(np.uint8)


def weighted(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(
        loss=-(inputs.logprobs * inputs.advantages).sum(), count=float(len(inputs.logprobs)), metrics={}
    )


class Chosen:
    """What the routers of a trainer's model chose, call by call: int64 [tokens, top_k] each."""

    def __init__(self, trainer: TorchNative) -> None:
        self.calls: list[Tensor] = []
        for layer in trainer.model.model.layers:
            if hasattr(layer.mlp, "experts"):
                layer.mlp.experts.register_forward_pre_hook(
                    lambda _, arguments: self.calls.append(arguments[1].detach().clone())
                )


@pytest.fixture
def trainer(trained_folder) -> Callable[..., TorchNative]:
    def make(folding: bool = True, dtype: torch.dtype = torch.float32, **options: Any) -> TorchNative:
        found = TorchNative(trained_folder, settings=SETTINGS, dtype=dtype, options=NativeOptions(**options))
        if not folding:
            vars(found._policy)["_can_fold"] = False
        return found

    return make


SHAPES = {
    "padded": [(1, 5, 4), (2, 9, 7), (3, 3, 11)],
    "folded": [(1, 9, 4), (1, 9, 7), (1, 9, 3), (2, 12, 5), (2, 12, 1)],
    "a prompt with several routes": [(1, 9, 4), (-1, 9, 7), (1, 9, 3), (-1, 9, 5), (2, 12, 6), (2, 12, 2)],
    "one row": [(1, 1, 6)],
}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("layout", [*SHAPES, "end to end"])
def test_the_training_pass_sends_every_token_where_its_route_says(trainer, routing, layout, checkpointing):
    """Every layout, in forward, in the training pass, and in the backward that computes layers again."""
    rows = random_rows(routing, SHAPES["padded" if layout == "end to end" else layout])
    batch = batch_of(rows)
    ours = trainer(
        folding=layout not in ("padded", "end to end"),
        packing=layout == "end to end",
        gradient_checkpointing=checkpointing,
    )
    chosen = Chosen(ours)

    ours.forward(batch)
    ours.forward_backward(batch, weighted)

    layers = len(routing.layers)
    assert len(chosen.calls) == (3 if checkpointing else 2) * layers
    for call in range(0, len(chosen.calls), layers):
        by_layer = chosen.calls[call : call + layers]
        if call == 2 * layers:
            by_layer = by_layer[::-1]  # a backward begins at the last layer
        used = torch.stack(by_layer, dim=1)
        assert batch.routes is not None
        for place, token in _places(batch, layout):
            if int(batch.routes[token, 0, 0]) >= 0:
                assert used[place].tolist() == batch.routes[token].tolist()


def _places(batch: Packed, layout: str) -> list[tuple[int, int]]:
    """Where each token of a batch is computed, worked out row by row: (place, token)."""
    starts, lengths = batch.offsets.tolist(), batch.offsets.diff().tolist()
    if layout == "end to end":
        return [(token, token) for token in range(len(batch.tokens))]
    width = max(lengths)
    folded = None if layout == "padded" else fold(batch)
    if folded is None:
        return [
            (row * width + i, starts[row] + i) for row, length in enumerate(lengths) for i in range(length)
        ]
    return [
        (int(folded.cells[row, i]), starts[row] + i)
        for row, length in enumerate(lengths)
        for i in range(length)
    ]


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_logprobs_and_gradients_are_those_of_plain_transformers_led_by_hand(
    trainer, routing, oracle, weights, shapes
):
    rows = random_rows(routing, shapes)
    batch = batch_of(rows)
    ours = trainer(dtype=torch.float64)

    logprobs = ours.forward(batch)
    ours.forward_backward(batch, weighted)

    expected, gradients = _led_by_hand(oracle, weights(0), rows, batch.fields["advantages"])
    assert torch.allclose(logprobs, expected, atol=1e-5)
    found = {name: p.grad for name, p in ours.model.named_parameters()}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(found[name].float(), gradient, atol=1e-4, rtol=1e-3), name
    routers = [gradient for name, gradient in found.items() if name.endswith("mlp.gate.weight")]
    assert len(routers) == len(routing.layers)
    assert all(float(gradient.abs().max()) > 1e-4 for gradient in routers), "the routers have to train"


def _led_by_hand(
    oracle: Any, weights: dict[str, Tensor], rows: Sequence[Row], advantages: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows one by one through plain transformers, whose routers are replaced by the formula."""
    model = oracle.model
    oracle.load(weights)
    model.zero_grad()
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    found = []
    try:
        for tokens, prompt, routes in rows:
            for place, gate in enumerate(gates):
                gate.forward = _leading(gate, torch.from_numpy(routes[:, place].astype(np.int64)))
            logits = model(input_ids=torch.from_numpy(tokens[None, :-1]), use_cache=False).logits[0]
            every = torch.log_softmax(logits / SETTINGS.temperature, dim=-1)
            targets = torch.from_numpy(tokens[prompt:])
            found.append(every[prompt - 1 :].gather(1, targets[:, None])[:, 0])
        logprobs = torch.cat(found)
        (-(logprobs * advantages).sum()).backward()
    finally:
        for gate in gates:
            del gate.forward
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return logprobs.detach(), gradients


def _leading(gate: Any, experts: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ gate.weight.t()
        # softmax over all experts and then over the chosen ones' sum is softmax over the chosen logits
        return logits, torch.softmax(logits.gather(1, experts), dim=-1), experts

    return forward


async def test_a_trainer_follows_the_engine_bit_for_bit_in_bfloat16(
    trained_folder, trainer, routing, make_request
):
    """Left alone, the trainer's routers choose otherwise here and there; led, they never do."""
    engine = TransformersEngine(trained_folder, version=0, dtype="bfloat16", capture_routes=True)
    requests = [make_request(f"r{n}", seed=n, length=5 + 6 * n, max_new_tokens=60) for n in range(6)]
    try:
        found = {one.id: one.generation async for one in engine.generate(requests)}
    finally:
        await engine.close()
    rows = [
        (np.concatenate([r.tokens, found[r.id].tokens]), len(r.tokens), _routes_of(found[r.id]))
        for r in requests
    ]
    batch = batch_of(rows)
    assert batch.routes is not None
    told = np.concatenate([found[r.id].logprobs for r in requests])
    ours = trainer(dtype=torch.bfloat16, folding=False)
    chosen = Chosen(ours)

    gaps, differing = [], []
    for one in (batch, dataclasses.replace(batch, routes=None)):
        chosen.calls.clear()
        at_temperature_one = dataclasses.replace(one, fields={})
        logprobs = ours.forward(at_temperature_one)
        used = torch.stack(chosen.calls, dim=1)
        differing.append(
            sum(
                used[place].tolist() != batch.routes[token].tolist()
                for place, token in _places(batch, "padded")
                if int(batch.routes[token, 0, 0]) >= 0
            )
        )
        gaps.append(float(np.abs(logprobs.numpy() - told).mean()))

    assert differing[0] == 0
    assert differing[1] > 0, "without a difference to prevent, nothing is shown"
    assert gaps[0] < gaps[1]


def test_without_routes_routers_choose_for_themselves(trainer, routing, oracle, weights):
    """What a reference pass does, right after a pass that was led."""
    rows = random_rows(routing, SHAPES["padded"])
    batch = batch_of(rows)
    ours = trainer(folding=False)
    led = ours.forward(batch)
    chosen = Chosen(ours)

    free = ours.forward(dataclasses.replace(batch, routes=None))

    assert float((led - free).abs().max()) > 1e-3
    used = torch.stack(chosen.calls, dim=1)
    for row, (tokens, _, _) in enumerate(rows):
        start = row * max(len(r[0]) for r in rows)
        assert np.array_equal(
            used[start : start + len(tokens) - 1].numpy(), oracle.routes(weights(0), tokens)
        )


def test_a_token_without_a_route_is_routed_freely_among_others_that_are_led(trainer, routing):
    batch = batch_of(random_rows(routing, SHAPES["padded"]))
    free = [2, 7, 13]
    assert batch.routes is not None
    batch.routes[free] = -1
    ours = trainer(folding=False)
    chosen = Chosen(ours)

    ours.forward(batch)
    used = torch.stack(chosen.calls, dim=1)
    chosen.calls.clear()

    places = {token: place for place, token in _places(batch, "padded")}
    for token, place in places.items():
        if int(batch.routes[token, 0, 0]) >= 0:
            assert used[place].tolist() == batch.routes[token].tolist()
    # In the first layer a token's hidden state depends on no route, so its own choice is known.
    ours.forward(dataclasses.replace(batch, routes=None))
    own = torch.stack(chosen.calls, dim=1)
    for token in free:
        assert used[places[token], 0].tolist() == own[places[token], 0].tolist()


def test_a_backward_that_recomputes_follows_its_own_micro_batch(trainer, routing):
    """Though another one went forward in between, on other routes and without any."""
    first, other = (batch_of(random_rows(routing, SHAPES["padded"], seed)) for seed in (0, 1))
    gradients = []
    for checkpointing in (False, True):
        ours = trainer(gradient_checkpointing=checkpointing)
        loss = ours._policy(first).sum()
        ours._policy(other)
        ours._policy(dataclasses.replace(other, routes=None))
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in ours.model.parameters()]))
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda routes: routes[:-1], r"routes have shape \(38, 2, 2\); the 39 tokens"),
        (lambda routes: routes[:, :1], r"this model has 2 routing layers and top_k 2"),
        (lambda routes: routes[..., :1], r"this model has 2 routing layers and top_k 2"),
        (lambda routes: routes + 6, r"routes name experts 5 to 13; this model has 0 to 7"),
    ],
)
def test_routes_of_another_model_or_batch_are_refused(trainer, routing, spoil, message):
    batch = batch_of(random_rows(routing, SHAPES["padded"]))

    with pytest.raises(BatchError, match=message):
        trainer().forward(dataclasses.replace(batch, routes=spoil(batch.routes)))


def test_a_dense_model_refuses_routes(tmp_path, routing):
    batch = batch_of(random_rows(routing, SHAPES["padded"]))

    with pytest.raises(BatchError, match=r"the batch has routes, but .* has no experts to route to"):
        TorchNative(write_tiny(tmp_path), settings=SETTINGS).forward(batch)


def test_a_replica_is_given_the_routes_of_its_own_rows_and_no_others(routing):
    rows = random_rows(routing, [(1, 5, 4), (2, 9, 7), (3, 3, 11), (4, 2, 2), (5, 6, 3)])

    pieces = [piece for part in cut(batch_of(rows), 2) for piece in part]

    assert sorted(row for piece in pieces for row in piece.rows) == list(range(5))
    for piece in pieces:
        expected = batch_of([rows[row] for row in piece.rows]).routes
        assert piece.batch.routes is not None
        assert expected is not None
        assert torch.equal(piece.batch.routes, expected)


def _routes_of(generation: Generation) -> np.ndarray:
    assert generation.routes is not None
    return generation.routes
