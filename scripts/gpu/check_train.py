"""The train part of the GPU check: a small Qwen3 trained, served and compared; see scripts/gpu_check.sh."""

import argparse
import asyncio
import dataclasses
import faulthandler
import gc
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import Figures

NO_DEVICE = 2
LIMIT_SECONDS = 350
GIB = 1 << 30
NEEDED = ("torch", "numpy", "transformers", "safetensors", "msgspec", "pydantic", "pydantic_settings", "zmq",
          "xxhash", "zstandard", "megatron.core")  # fmt: skip

# Bounds against float32 on the CPU, in nat. bfloat16 keeps 8 bits: logits of order 1 are off by about 1e-2.
EXACT_MAX, HALF_MEAN, HALF_MAX = 1e-3, 0.02, 0.25
EXACT_NORM, HALF_NORM = 1e-3, 0.05
RANK_TOKENS = 1024


@dataclasses.dataclass(frozen=True)
class Expected:
    """What float32 on the CPU says of the compared rows: logprobs, the loss, the gradient's norm."""

    logprobs: Any
    loss: float
    norm: float


class Check:
    """The checks, on one device, each on a model folder that they share."""

    def __init__(self, device: str, folder: Path, sizes: Any) -> None:
        import torch
        from relax import algorithms
        from relax.backends.train.settings import TrainerSettings

        self.device, self.folder, self.sizes = device, folder, sizes
        self.on_gpu = device.startswith("cuda")
        self.settings = TrainerSettings(lr=1e-5)
        self.loss = algorithms.build("grpo", {}).loss
        self.dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        self.expected: Expected | None = None

    def machine(self, figures: Figures) -> None:
        import megatron.core
        import torch
        import transformers

        how = (
            f"torch {torch.__version__}, transformers {transformers.__version__}, megatron-core "
            f"{megatron.core.__version__}, {os.cpu_count()} CPUs, Python {sys.version.split()[0]}"
        )
        if self.on_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            memory = properties.total_memory / GIB
            figures.add("device memory", memory, "GiB", "", True, f"{how}, {properties.name}")
        else:
            figures.add("rehearsal on a CPU", None, "", "", True, how)

    def reference(self, figures: Figures) -> None:
        """The model, and what the CPU says in float32."""
        from relax.backends.train.torch_native import TorchNative
        from train_work import write_model

        count = write_model(self.folder, self.sizes, self.device)
        began = time.perf_counter()
        trainer = TorchNative(self.folder, settings=self.settings, torch_threads=os.cpu_count())
        batch, logprobs = self._compared(trainer)
        outputs = trainer.forward_backward(batch, self.loss)
        norm = trainer.optim_step(1 / outputs.count).grad_norm
        self.expected = Expected(logprobs, float(outputs.loss) / outputs.count, norm)
        took = time.perf_counter() - began
        figures.add("reference on the CPU, float32", took, "s", "", True, f"Qwen3, {count} parameters")

    def _compared(self, trainer: Any) -> tuple[Any, Any]:
        """The rows that are compared, their old logprobs those of the CPU where it has said them."""
        from train_work import batch_of, off_policy

        batch = batch_of(self.sizes, self.sizes.compared, 1)
        logprobs = trainer.forward(batch)
        old = logprobs if self.expected is None else self.expected.logprobs
        return off_policy(batch, old), logprobs

    def _agrees(self, figures: Figures, name: str, trainer: Any, dtype: str) -> None:
        """Logprobs, loss and gradient norm of the compared rows against the CPU's."""
        from train_work import apart

        if self.expected is None:
            raise RuntimeError("there is no reference: its part failed")
        batch, logprobs = self._compared(trainer)
        mean, largest = apart(logprobs, self.expected.logprobs)
        exact = dtype == "float32"
        # The reference is torch_native in float32 on the CPU: where that is the device too, it meets itself.
        itself = exact and name == "torch_native" and not self.on_gpu
        note = "says nothing on a CPU: it is the reference itself; " if itself else ""
        goal = f"max <= {EXACT_MAX}" if exact else f"mean <= {HALF_MEAN}, max <= {HALF_MAX}"
        holds = largest <= EXACT_MAX if exact else mean <= HALF_MEAN and largest <= HALF_MAX
        how = f"{note}{len(logprobs)} response tokens, mean {mean:.2e}, max {largest:.2e}"
        claim = f"{name} {dtype}: logprobs against the CPU"
        figures.add(claim, largest, "nat", goal, None if itself else holds, how)
        outputs = trainer.forward_backward(batch, self.loss)
        loss = float(outputs.loss) / outputs.count
        norm = trainer.optim_step(1 / outputs.count).grad_norm
        bound = EXACT_MAX if exact else HALF_MEAN
        off = abs(loss - self.expected.loss)
        how = f"{note}GRPO, {loss:.6f} here, {self.expected.loss:.6f} on the CPU"
        claim, ok = f"{name} {dtype}: loss against the CPU", None if itself else off <= bound
        figures.add(claim, off, "nat", f"<= {bound}", ok, how)
        bound = EXACT_NORM if exact else HALF_NORM
        off = abs(norm / self.expected.norm - 1)
        how = f"{note}gradient norm {norm:.5f} here, {self.expected.norm:.5f} on the CPU"
        claim, ok = f"{name} {dtype}: gradient norm against the CPU", None if itself else off <= bound
        figures.add(claim, off, "", f"<= {bound}", ok, how)

    def _steps(self, figures: Figures, name: str, trainer: Any) -> None:
        """Steps of GRPO on one batch: it is learnt, at what speed, in how much memory."""
        import torch
        from train_work import batch_of

        batch = batch_of(self.sizes, self.sizes.trained, 2)
        fields = {**batch.fields, "rollout_logprobs": trainer.forward(batch).cpu().float()}
        batch = dataclasses.replace(batch, fields=fields)
        seconds, losses, whole = [], [], True
        for _ in range(self.sizes.steps + 1):
            began = time.perf_counter()
            outputs = trainer.forward_backward(batch, self.loss)
            stats = trainer.optim_step(1 / outputs.count)
            if self.on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            losses.append(float(outputs.loss) / outputs.count)
            whole = whole and not stats.skipped
        typical = sorted(seconds[1:])[len(seconds[1:]) // 2]
        how = f"{batch.rows} rows, {len(batch.tokens)} tokens a step, median of {self.sizes.steps}"
        figures.add(f"{name}: training", len(batch.tokens) / typical, "tokens/s", "", True, how)
        figures.add(
            f"{name}: the loss falls on a batch that is repeated",
            losses[-1] - losses[0],
            "nat",
            "< 0, no step skipped",
            whole and losses[-1] < losses[0],
            f"{losses[0]:.5f} to {losses[-1]:.5f} in {len(losses)} steps, lr {self.settings.lr}",
        )
        self._peak(figures, f"{name}: training")

    def _peak(self, figures: Figures, name: str) -> None:
        """Peak memory since `_fresh`."""
        import torch

        if self.on_gpu:
            peak = torch.cuda.max_memory_allocated() / GIB
            figures.add(f"{name}, peak memory", peak, "GiB", "", True, "torch.cuda.max_memory_allocated()")

    def _fresh(self) -> None:
        import torch

        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def _native(self, dtype: str) -> Any:
        from relax.backends.train.torch_native import TorchNative

        threads = None if self.on_gpu else 1
        return TorchNative(
            self.folder,
            settings=self.settings,
            dtype=self.dtypes[dtype],
            device=self.device,
            torch_threads=threads,
        )

    def native(self, figures: Figures) -> None:
        """torch_native in float32, then in bfloat16 with float32 masters."""
        self._fresh()
        trainer = self._native("float32")
        self._agrees(figures, "torch_native", trainer, "float32")
        del trainer
        self._fresh()
        trainer = self._native("bfloat16")
        self._agrees(figures, "torch_native", trainer, "bfloat16")
        self._steps(figures, "torch_native bfloat16, float32 masters", trainer)

    def engine(self, figures: Figures) -> None:
        """The embedded engine generates, and takes the weights of a trainer that has stepped."""
        self._fresh()
        asyncio.run(self._engine(figures))

    async def _engine(self, figures: Figures) -> None:
        from agentic import GenerationRequest, Sampling
        from relax.backends.inference.transformers_engine import TransformersEngine
        from train_work import answered, apart, batch_of, prompts

        engine = TransformersEngine(
            self.folder,
            version=0,
            dtype="bfloat16",
            device=self.device,
            max_running=self.sizes.requests,
            capacity_tokens=self.sizes.prompt + self.sizes.answer,
        )
        trainer = self._native("bfloat16")
        asked = prompts(self.sizes)
        sampling = Sampling(max_new_tokens=self.sizes.answer)
        try:
            for version in (0, 1):
                if version:
                    batch = batch_of(self.sizes, self.sizes.trained, 3)
                    outputs = trainer.forward_backward(batch, self.loss)
                    trainer.optim_step(1 / outputs.count)
                    await engine.begin_update(version, dict(trainer.tensors()))
                    report = await engine.commit_update(version)
                    how = "trainer.tensors() copied between two decode steps"
                    figures.add("engine: weight update", report.pause_seconds, "s", "", True, how)
                began = time.perf_counter()
                requests = [
                    GenerationRequest(f"{version}-{row}", prompt, sampling, seed=row)
                    for row, prompt in enumerate(asked)
                ]
                found = {one.id: one.generation async for one in engine.generate(requests)}
                took = time.perf_counter() - began
                given = [found[request.id] for request in requests]
                tokens = sum(len(one.tokens) for one in given)
                figures.add(
                    f"engine bfloat16, version {version}: generation",
                    tokens / took,
                    "tokens/s",
                    f"{self.sizes.answer} tokens each, of version {version}",
                    all(
                        len(one.tokens) == self.sizes.answer and {span[0] for span in one.spans} == {version}
                        for one in given
                    ),
                    f"{len(given)} requests together, {tokens} tokens",
                )
                batch = answered(asked, [one.tokens for one in given], [one.logprobs for one in given])
                mean, largest = apart(trainer.forward(batch), batch.fields["rollout_logprobs"])
                figures.add(
                    f"engine and trainer, version {version}: logprobs",
                    mean,
                    "nat",
                    f"mean <= {HALF_MEAN}, max <= {HALF_MAX}",
                    mean <= HALF_MEAN and largest <= HALF_MAX,
                    f"bfloat16 both, mean {mean:.2e}, max {largest:.2e}",
                )
            self._peak(figures, "engine and trainer side by side")
        finally:
            await engine.close()

    def megatron(self, figures: Figures) -> None:
        """megatron-core with the local spec, one rank, on the same rows."""
        import torch.distributed
        from relax.backends.train.megatron.rank import MegatronRank
        from relax.backends.train.ranks import RankSpec
        from relax.config.roles import ActorSettings

        kind = "nccl" if self.on_gpu else "gloo"
        distributed: Any = torch.distributed  # its stubs do not know the stores
        store = distributed.HashStore()
        distributed.init_process_group(kind, store=store, rank=0, world_size=1)
        try:
            for dtype in self.dtypes:
                self._fresh()
                actor = ActorSettings.model_validate(
                    {"backend": "megatron", "dtype": dtype, "megatron": {"transformer_engine": False}}
                )
                spec = RankSpec(self.folder, self.settings, actor, device=self.device, torch_threads=None)
                rank = MegatronRank(spec)
                try:
                    trainer = Alone(rank)
                    self._agrees(figures, "megatron, local spec,", trainer, dtype)
                    if dtype == "bfloat16":
                        self._steps(figures, "megatron bfloat16, local spec", trainer)
                finally:
                    rank.close()
        finally:
            distributed.destroy_process_group()


class Alone:
    """A single rank spoken to as a `TrainBackend` is: with one micro-batch, which is cut into pieces."""

    def __init__(self, rank: Any) -> None:
        self._rank = rank

    def forward(self, batch: Any) -> Any:
        from relax.backends.train.gang.rounds import in_row_order

        pieces = self._cut(batch)
        return in_row_order(batch, pieces, [self._rank.forward([piece.batch for piece in pieces[0]])])

    def forward_backward(self, batch: Any, loss: Any) -> Any:
        return self._rank.forward_backward([piece.batch for piece in self._cut(batch)[0]], loss)

    def _cut(self, batch: Any) -> Any:
        """As a gang does for `actor.rank_tokens`: the mask of the local spec grows with the square."""
        from relax.backends.train.gang.rounds import cut

        return cut(batch, 1, tokens=RANK_TOKENS)

    def optim_step(self, scale: float) -> Any:
        return self._rank.optim_step(scale)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, tiny, with gloo")
    rehearse = parser.parse_args().rehearse
    absent = [module for module in NEEDED if not _is_there(module)]
    if absent:
        print(
            f"{sys.executable} lacks {', '.join(absent)}; carry wheels (scripts/gpu/carry.sh, "
            "--wheels=FOLDER), or give another one as PYTHON=..."
        )
        return 1
    import torch

    if not rehearse and not torch.cuda.is_available():
        print("no CUDA device here")
        return NO_DEVICE
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)  # a hang is a failure, with its place
    from train_work import LARGE, SMALL

    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="relax-gpu-") as scratch:
        folder = Path(scratch)
        check = Check("cpu", folder, SMALL) if rehearse else Check("cuda:0", folder, LARGE)
        for part in (check.machine, check.reference, check.native, check.engine, check.megatron):
            figures.run(part.__name__, part)
    faulthandler.cancel_dump_traceback_later()
    return figures.summary()


if __name__ == "__main__":
    sys.exit(main())
