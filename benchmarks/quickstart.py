"""The quick start as `make train` runs it, in both modes: start-up, steps a second, where a step's time goes.

    python benchmarks/quickstart.py [--quick]

`--quick` runs a dozen steps of async only, and does not claim what only a whole run shows.
"""

import argparse
import tempfile
from pathlib import Path

import yaml
from claims import above, at_least, at_most, figure, load_note, median, print_claim, print_machine
from measure.training_run import TrainingRun, train

CONFIG = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
WARM_UP = 5
"""Steps that are not measured."""
LAST = 6
"""Steps whose mean reward tells whether the run learned."""
MODES = {"async": ("mode=async", "max_staleness=1"), "colocate": ("mode=colocate", "max_staleness=0")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a dozen steps of async: under a minute")
    quick = parser.parse_args().quick
    print_machine()
    settings = yaml.safe_load(CONFIG.read_text())
    steps = 12 if quick else settings["steps"]
    with tempfile.TemporaryDirectory(prefix="relax-benchmark-") as scratch:
        for mode in ("async",) if quick else MODES:
            run = train(
                CONFIG,
                [*MODES[mode], "seed=0"],
                Path(scratch),
                mode,
                steps=steps,
                warm_up=WARM_UP,
                timeout=300,
                cwd=CONFIG.parent.parent,
            )
            report(mode, run, settings, whole=not quick)


def report(mode: str, run: TrainingRun, settings: dict, *, whole: bool) -> None:
    """Print the claims of one run; those of a whole run only if it was one."""
    steps = len(run.metrics)
    load = load_note(max(run.window.others_before, run.window.others))
    command = f"relax train configs/quickstart.yaml mode={mode}, {steps} steps"
    how = f"{command}; {load}"
    measured = f"{command}, {WARM_UP + 1} to {steps}; {load_note(run.window.others)}"

    name = f"quick start {mode}"
    print_claim(
        at_most(f"{name}: start-up", run.first_step, "s", 45, f"{how}; command to end of the first step")
    )
    begun = f"{how}; whole system, start-up and the first {WARM_UP} steps"
    print_claim(figure(f"{name}: CPU of the start-up", run.window.cpu_before, "CPU-s", begun))
    if whole:
        print_claim(at_most(f"{name}: whole command", run.wall, "s", 120, how))
        learned = sum(run.rewards()[-LAST:]) / LAST
        print_claim(above(f"{name}: mean reward of the last {LAST} steps", learned, "1", 0.95, how))
    wall = median(run.window.walls)
    print_claim(figure(f"{name}: steps a second", 1 / wall, "1/s", f"{measured}; 1 / median wall of a step"))
    print_claim(
        figure(f"{name}: CPU of a step", median(run.window.cpu), "CPU-s", f"{measured}; {_where(run)}")
    )
    for phase, seconds in run.phases(WARM_UP).items():
        print_claim(figure(f"{name}: actor's {phase} in a step", median(seconds), "s", f"{measured}; median"))
    generated = run.generated_tokens(settings["rollout"]["max_new_tokens"])
    print_claim(
        at_least(
            f"{name}: goodput",
            run.trained_tokens() / generated,
            "1",
            0.99,
            f"{how}; {run.trained_tokens():.0f} tokens trained of {generated} generated",
        )
    )


def _where(run: TrainingRun) -> str:
    shown = [f"{name} {cpu:.3f}" for name, cpu in run.window.cpu_by_name.items() if cpu >= 0.001]
    return f"whole system, {run.window.processes} processes: {', '.join(shown)}"


if __name__ == "__main__":
    main()
