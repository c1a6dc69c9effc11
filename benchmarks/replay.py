"""Routing replay (R3): what capturing, carrying and replaying routes costs, and what it mends.

    python benchmarks/replay.py [--quick]

On a tiny mixture of experts that has been trained, in one process. `--quick` trains it shorter and measures
fewer rounds: under a minute.
"""

import argparse
import tempfile
from pathlib import Path

from claims import at_least, at_most, figure, load_note, median, print_claim, print_machine, ratio_of_medians
from measure.cpu_clock import Meanwhile
from measure.rounds import Figures, in_turn

GOAL_OVERHEAD = 0.01
GOAL_FALL = 0.38


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds: under a minute")
    quick = parser.parse_args().quick
    print_machine()
    # After the line about the machine: its load is that of others.
    import torch
    from replay_sides.language import SHAPE, Text, trained

    torch.set_num_threads(1)
    text = Text()
    steps, rounds = (200, 5) if quick else (600, 25)
    with tempfile.TemporaryDirectory(prefix="relax-benchmark-") as scratch:
        folder, losses = trained(Path(scratch), steps, text)
        layers, experts, top_k = (
            SHAPE[f"num_{key}"] for key in ("hidden_layers", "experts", "experts_per_tok")
        )
        how = f"{layers} layers, {experts} experts, top {top_k}"
        print_claim(
            figure(
                "replay: loss of the model after training",
                sum(losses[-20:]) / 20,
                "nat/character",
                f"Qwen3-MoE, {how}, {steps} supervised steps on this project's documentation; "
                f"{losses[0]:.2f} before",
            )
        )
        report_mismatch(folder, text, how)
        report_cost(folder, text, how, rounds)


def report_mismatch(folder: Path, text: object, how: str) -> None:
    from replay_sides.mismatch import mismatch

    found = mismatch(folder, text)  # type: ignore[arg-type]
    how = f"{how}, bfloat16 on both sides, equal weights, {found.tokens} sampled tokens"
    print_claim(
        figure("replay: places where a free trainer chooses other experts", found.differing, "1", how)
    )
    print_claim(figure("replay: mean |engine - trainer| logprob, free", found.free, "nat", how))
    print_claim(figure("replay: mean |engine - trainer| logprob, led", found.led, "nat", how))
    print_claim(at_least("replay: the mismatch falls by", 1.0 - found.led / found.free, "1", GOAL_FALL, how))


def report_cost(folder: Path, text: object, how: str, rounds: int) -> None:
    from replay_sides import step

    sides = {
        name: step.Step(folder, text, replay=name == "with")  # type: ignore[arg-type]
        for name in ("with", "without")
    }
    meanwhile = Meanwhile()
    try:
        found = in_turn({name: side.__call__ for name, side in sides.items()}, rounds, warm_up=2)
    finally:
        for side in sides.values():
            side.close()
    routing = sides["with"].routing
    how = (
        f"{how}, {step.PROMPTS} prompts x {step.SAMPLES} samples x {step.NEW_TOKENS} tokens, {rounds} rounds "
        f"in turn, medians of CPU-seconds; {load_note(meanwhile.others())}"
    )
    whole = median(found["without"]["whole"])
    for part in ("generate", "carry", "train"):
        more = median(found["with"][part]) - median(found["without"][part])
        print_claim(figure(f"replay: {part}, share of a step added", more / whole, "1", how))
    print_claim(figure("replay: CPU of a step without", whole, "CPU-s", how))
    print_claim(
        at_most(
            "replay: a step with capture, carry and replay costs more by",
            _overhead(found),
            "1",
            GOAL_OVERHEAD,
            how,
        )
    )
    print_claim(
        figure(
            "replay: routes of a token",
            routing.bytes_per_token,
            "B",
            f"{len(routing.layers)} layers x top {routing.top_k} of {routing.experts} experts as "
            f"{routing.dtype}; Qwen3-30B-A3B: 48 x 8 = 384 B",
        )
    )


def _overhead(found: dict[str, Figures]) -> float:
    return ratio_of_medians(found["with"]["whole"], found["without"]["whole"]) - 1.0


if __name__ == "__main__":
    main()
