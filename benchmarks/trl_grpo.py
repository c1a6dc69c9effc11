"""The same GRPO work as TRL's GRPOTrainer, on the same machine, in turn: wall and CPU-seconds of a step.

    python benchmarks/trl_grpo.py [--quick]

The work of a step: 8 prompts x 8 completions x 32 tokens and one AdamW step, from the same folder of a tiny
Qwen3 (105k parameters, float32), the same prompts, no end token, the same reward. Ours is `relax train` as it
stands, with all its processes; theirs is `peers/trl_grpo_peer.py`, on one thread and on two. Both sides do
their steps in
turn: a block of theirs, a run of ours, a block of theirs, and so on. Needs `make bench-peers`.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from claims import at_most, figure, load_note, median, print_claim, print_machine, ratio_of_medians
from measure.training_run import TrainingRun, train
from peers.blocks import Peer

ROOT = Path(__file__).parent.parent
PROMPTS, COMPLETIONS, TOKENS = 8, 8, 32
TRAINED = PROMPTS * COMPLETIONS * TOKENS
LR, SEED, CHARACTER = 3e-3, 0, "7"
DATA = ROOT / "configs" / "data" / "sevens.jsonl"
REPLICAS = {"async": 1, "colocate": 1}
"""Best here: with two cores, one engine beside the trainer decodes 64 rows at once and leaves it a core."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    """Times that each mode of ours runs."""
    steps: int
    """Of a run of ours."""
    warm_up: int
    """First steps, of a run and of a side, that are not measured."""
    block: int
    """Steps of a block of theirs."""
    block_seconds: float
    """Longest block of theirs."""


FULL = Size(rounds=2, steps=50, warm_up=10, block=20, block_seconds=30.0)
QUICK = Size(rounds=1, steps=16, warm_up=6, block=6, block_seconds=5.0)


@dataclass
class Theirs:
    """What was measured of TRL with a number of threads."""

    threads: int
    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps: about a minute")
    size = QUICK if parser.parse_args().quick else FULL
    if importlib.util.find_spec("trl") is None:
        print("skipped: TRL is not installed; `make bench-peers` installs it", file=sys.stderr)
        return
    print_machine()
    with tempfile.TemporaryDirectory(prefix="relax-benchmark-") as name:
        scratch = Path(name)
        model = write_model(scratch / "model")
        theirs, ours = measure(size, scratch, model)
    report(size, theirs, ours)


def measure(size: Size, scratch: Path, model: Path) -> tuple[dict[int, Theirs], dict[str, list[TrainingRun]]]:
    """Both sides in turn."""
    config = write_config(scratch / "work.yaml", model)
    theirs = {threads: Theirs(threads) for threads in (1, 2)}
    ours: dict[str, list[TrainingRun]] = {"async": [], "colocate": []}
    with Peer(ROOT / "benchmarks" / "peers" / "trl_grpo_peer.py", work(model, scratch / "trl")) as peer:
        their_block(peer, theirs, size, skip=min(3, size.block - 1))
        for turn in range(size.rounds):
            for mode in ours:
                ours[mode].append(our_run(mode, turn, config, scratch, size))
                their_block(peer, theirs, size, skip=1)
    return theirs, ours


def their_block(peer: Peer, theirs: dict[int, Theirs], size: Size, skip: int) -> None:
    """One block with each number of threads; the first `skip` steps of each are not measured."""
    for side in theirs.values():
        block = peer.block(steps=size.block, threads=side.threads, seconds=size.block_seconds)
        wrong = [tokens for tokens in block["tokens"] if tokens != TRAINED]
        if wrong:
            raise RuntimeError(f"TRL trained {wrong[0]:.0f} tokens in a step, not {TRAINED}: unequal work")
        skipped = min(skip, len(block["walls"]) - 1)
        side.walls += block["walls"][skipped:]
        side.cpus += block["cpus"][skipped:]


def our_run(mode: str, turn: int, config: Path, scratch: Path, size: Size) -> TrainingRun:
    """One run of ours: async as processes under Ray, colocate with every role in the command's process."""
    words = {
        "async": ["mode=async", "max_staleness=1", "launcher=ray"],
        "colocate": ["mode=colocate", "max_staleness=0", "launcher=local"],
    }
    run = train(
        config,
        [*words[mode], f"rollout.replicas={REPLICAS[mode]}"],
        scratch / "runs",
        f"{mode}-{turn}",
        steps=size.steps,
        warm_up=size.warm_up,
        timeout=300,
        cwd=ROOT,
    )
    wrong = [line["tokens/trained"] for line in run.metrics if line["tokens/trained"] != TRAINED]
    if wrong:
        raise RuntimeError(f"relax trained {wrong[0]:.0f} tokens in a step, not {TRAINED}: unequal work")
    return run


def report(size: Size, theirs: dict[int, Theirs], ours: dict[str, list[TrainingRun]]) -> None:
    """The claims."""
    others = max(run.window.others for runs in ours.values() for run in runs)
    how = (
        f"{PROMPTS} x {COMPLETIONS} x {TOKENS} tokens, 105k parameters; TRL's blocks of {size.block} steps "
        f"and our runs of {size.steps} steps ({size.warm_up} warm-up) in turn, TRL first and last; medians; "
        f"{load_note(others)}"
    )
    for side in theirs.values():
        threads = f"TRL, {side.threads} thread{'s' if side.threads > 1 else ''}"
        steps = f"{how}; {len(side.walls)} steps"
        print_claim(figure(f"{threads}: wall of a step", median(side.walls), "s", steps))
        print_claim(figure(f"{threads}: CPU of a step", median(side.cpus), "CPU-s", steps))
    walls = {mode: [wall for run in runs for wall in run.window.walls] for mode, runs in ours.items()}
    cpus = {mode: [cpu for run in runs for cpu in run.window.cpu] for mode, runs in ours.items()}
    roots = {mode: [cpu for run in runs for cpu in run.window.cpu_root] for mode, runs in ours.items()}
    placed = {"async": "Ray, 1 engine replica", "colocate": "one process, 1 engine replica"}
    for mode in ours:
        steps = f"{how}; {placed[mode]}; {len(walls[mode])} steps"
        where = _where(ours[mode])
        print_claim(figure(f"relax {mode}: wall of a step", median(walls[mode]), "s", steps))
        print_claim(
            figure(
                f"relax {mode}: CPU of a step, whole system", median(cpus[mode]), "CPU-s", f"{steps}; {where}"
            )
        )
    print_claim(
        figure("relax colocate: CPU of a step, its one process", median(roots["colocate"]), "CPU-s", how)
    )
    best = min(theirs.values(), key=lambda side: median(side.walls))
    thrifty = min(theirs.values(), key=lambda side: median(side.cpus))
    print_claim(
        at_most(
            "async against TRL: wall of a step",
            ratio_of_medians(walls["async"], best.walls),
            "x",
            0.5,
            f"{how}; TRL at its fastest, {best.threads} thread(s); ours on {placed['async']}",
        )
    )
    print_claim(
        at_most(
            "colocate against TRL: CPU of a step, one process each",
            ratio_of_medians(roots["colocate"], thrifty.cpus),
            "x",
            0.7,
            f"{how}; TRL at its thriftiest, {thrifty.threads} thread(s); ours without the processes of the "
            "queue and of the weight coordinator",
        )
    )
    for mode in ours:
        print_claim(
            figure(
                f"{mode} against TRL: CPU of a step, whole system",
                ratio_of_medians(cpus[mode], thrifty.cpus),
                "x",
                f"{how}; TRL at its thriftiest, {thrifty.threads} thread(s); ours with every process that "
                "the command started",
            )
        )


def _where(runs: list[TrainingRun]) -> str:
    last = runs[-1].window
    shown = [f"{name} {cpu:.3f}" for name, cpu in last.cpu_by_name.items() if cpu >= 0.001]
    return f"{last.processes} processes: {', '.join(shown)}"


def work(model: Path, scratch: Path) -> str:
    """What the peer is told."""
    return json.dumps(
        {
            "model": str(model),
            "data": str(DATA),
            "prompts": PROMPTS,
            "completions": COMPLETIONS,
            "tokens": TOKENS,
            "lr": LR,
            "seed": SEED,
            "character": CHARACTER,
            "scratch": str(scratch),
        }
    )


def write_config(file: Path, model: Path) -> Path:
    """The same work as a configuration of relax: one forward and backward of all samples, as TRL does it."""
    samples = PROMPTS * COMPLETIONS
    content = {
        "seed": SEED,
        "model": str(model),
        "data": {"path": str(DATA), "prompt_column": "prompt"},
        "reward": {"name": "char_share", "kwargs": {"character": CHARACTER, "length": TOKENS}},
        "algorithm": "grpo",
        "rollout": {
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": COMPLETIONS,
            "max_new_tokens": TOKENS,
            "ignore_eos": True,
            "max_running": samples,
        },
        "actor": {"lr": LR, "betas": [0.9, 0.95], "clip_grad_norm": 1.0, "micro_batch_size": samples},
        "log": {"tensorboard": False},
    }
    file.write_text(yaml.safe_dump(content))
    return file


def write_model(folder: Path) -> Path:
    """A tiny Qwen3 with its weights drawn once, for both sides to load."""
    from relax.backends.models import build_model
    from relax.backends.tiny import write_tiny

    write_tiny(folder, "qwen3")
    build_model(folder, seed=SEED).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
