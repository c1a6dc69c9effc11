"""The `relax` command."""

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

if TYPE_CHECKING:
    from relax.config import RunConfig

app = typer.Typer(
    name="relax",
    help="Asynchronous reinforcement-learning post-training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
_error = Console(stderr=True)

Words = Annotated[
    list[str] | None,
    typer.Argument(help="CONFIG.yaml, then key=value words such as actor.lr=1e-6", show_default=False),
]


@app.command()
def train(
    words: Words = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder, from its newest checkpoint.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Follow the recorded schedule of this run, bit for bit.")
    ] = None,
) -> None:
    """Train: relax train configs/quickstart.yaml actor.lr=1e-3"""
    from relax.config import ConfigError

    try:
        _train(words or [], resume, replay)
    except ConfigError as error:
        _fail(str(error), 2)


def _train(words: list[str], resume: Path | None, replay: Path | None) -> None:
    from relax.config import ConfigError, load
    from relax.orchestration import run_folder
    from relax.orchestration.launcher import RoleFailed
    from relax.orchestration.train import prepare
    from relax.orchestration.train import train as run

    file, overrides = _split(words)
    if resume is not None:
        if file is not None:
            raise ConfigError(
                f"--resume takes the run's own configuration; leave {file} out, key=value words may stay"
            )
        folder, config = run_folder.reopen(resume, overrides)
        name = folder.path.name
    else:
        if replay is not None:
            if file is None and not (replay / "config.yaml").is_file():
                raise ConfigError(f"--replay {replay}: no run lies there (no config.yaml)")
            file = file or replay / "config.yaml"
            overrides = ["run.name=null", *overrides]  # a replay is a run of its own
        config = load(file, overrides)
        name = file.stem if file is not None else "run"
        if replay is not None:
            name = f"{replay.absolute().name}-replay"
        folder = run_folder.create(config, name)
    try:
        schedule = _schedule(replay, config.steps) if replay is not None else None
        context = prepare(config, folder, resume=resume is not None, replay=schedule)
    except ConfigError:
        if resume is None:
            run_folder.discard(folder)
        raise
    try:
        outcome = run(config, folder, context, name)
    except RoleFailed as error:
        _fail(f"{error}\nrun at {folder.path}", 1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        _fail(f"interrupted; run at {folder.path}", 130)
    if outcome.accounting is not None:
        typer.echo(f"samples: {outcome.accounting}")
        if not outcome.stopped:
            typer.echo(
                f"goodput: {outcome.goodput:.1%} of {outcome.generated_tokens:,.0f} generated tokens trained"
            )
        if outcome.weights:
            typer.echo(f"weights: {outcome.weights}")
        if outcome.engines:
            typer.echo(f"engines: {outcome.engines}")
        if outcome.waited:
            typer.echo(
                f"the queue was full: groups waited {outcome.waited:.0f} s for room, added up "
                f"(queue.max_bytes = {config.queue.max_bytes})"
            )
        if outcome.accounting.faults:
            _fail(f"the accounting of samples is not exact; see {folder.accounting}", 1)
    if outcome.stopped:
        typer.echo(f"stopped; go on with: relax train --resume {folder.path}")
    elif not outcome.rewards and context.first_step >= config.steps:
        typer.echo(
            f"nothing to do: {context.first_step} of {config.steps} steps are done; raise steps=N to go on"
        )
    typer.echo(outcome.summary)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    step: Annotated[int | None, typer.Option(help="Checkpoint to export; the newest when not given.")] = None,
) -> None:
    """Write a run's model as a Hugging Face folder: relax export runs/NAME OUT"""
    from relax.config import ConfigError
    from relax.orchestration.export import export_run

    try:
        checkpoint = export_run(run, out, step)
    except ConfigError as error:
        _fail(str(error), 2)
    typer.echo(f"step {checkpoint.step} written to {out}")


@app.command()
def doctor(
    words: Words = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="Hold it against the nodes that this file describes, not this machine."),
    ] = None,
) -> None:
    """Say what would run where, and what is wrong: relax doctor configs/quickstart.yaml"""
    from relax.config import ConfigError, load
    from relax.config.sizes import bytes_of
    from relax.orchestration.cluster import check_reached
    from relax.orchestration.plan import plan
    from relax.orchestration.run_folder import RunFolder, check_root
    from relax.orchestration.services import services
    from relax.orchestration.train import prepare
    from relax.orchestration.weights_trial import explain

    try:
        file, overrides = _split(words or [])
        config = load(file, overrides)
        if cluster is not None:
            _resolve(config, cluster, file)
            return
        Console().print(plan(config).table())
        check_root(config)
        check_reached(config)
        with tempfile.TemporaryDirectory() as folder:
            prepare(config, RunFolder(Path(folder)), resume=False)
        with services(config) as started:
            transport = started.transport
            weights = explain(config, started.weights)
    except ConfigError as error:
        _fail(str(error), 2)
    typer.echo(
        f"queue: {transport}, at most {bytes_of(config.queue.max_bytes) / 2**30:.1f} GiB "
        f"(queue.max_bytes = {config.queue.max_bytes})"
    )
    typer.echo(f"weights: {weights}")
    if config.rollout.engine == "sglang":
        from relax.backends.inference.sglang.installed import explain as explain_engines

        typer.echo(f"engines: {explain_engines(config.rollout)}")
    typer.echo(
        f"{config.mode}, max_staleness {config.max_staleness}, {config.steps} steps of "
        f"{config.batch_samples} samples: ok"
    )


@app.command()
def node(
    rank: Annotated[int, typer.Argument(help="Which node this is, from 0.", min=0)],
    words: Words = None,
) -> None:
    """Print what `ray start --labels` takes for this node; used by scripts/entrypoint/spmd-multinode.sh."""
    from relax.config import ConfigError
    from relax.orchestration.nodes import labels_of

    try:
        file, overrides = _split(words or [])
        labels = labels_of(rank, file, overrides)
    except ConfigError as error:
        _fail(str(error), 2)
    typer.echo(",".join(f"{name}={value}" for name, value in labels.items()))


def _resolve(config: "RunConfig", cluster: Path, file: Path | None) -> None:
    """Print what would be where on a cluster that is only described; ends with 2 if something cannot work."""
    from relax.config.cluster import load_cluster
    from relax.orchestration.resolution import resolve_on

    described = load_cluster(cluster)
    found = resolve_on(config, described, None if file is None else file.parent / "models")
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(found.places())
    if found.estimates:
        console.print(found.memories())
    for note in found.notes:
        typer.echo(f"note: {note}")
    if found.faults:
        _fail(f"this run does not fit {cluster}:\n  " + "\n  ".join(found.faults), 2)
    typer.echo(
        f"{config.mode}, max_staleness {config.max_staleness}, {config.steps} steps of "
        f"{config.batch_samples} samples on {sum(role.gpus for role in found.plan.roles)} of "
        f"{described.gpus} GPUs: resolves"
    )


def _split(words: list[str]) -> tuple[Path | None, list[str]]:
    """The configuration file and the key=value words; the file is the one word without an equals sign."""
    from relax.config import ConfigError

    for word in words:
        if not word.partition("=")[0] and word:
            raise ConfigError("there are spaces around an equals sign; a word is key=value, without them")
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(
            f"more than one configuration file: {', '.join(files)}; further words are key=value"
        )
    return (Path(files[0]) if files else None), [word for word in words if "=" in word]


def _schedule(run: Path, steps: int) -> Path:
    """The folder of a recorded schedule that covers every step."""
    from relax.config import ConfigError
    from relax.distributed.schedule import losses, read

    recorded = run.absolute() / "schedule" / "segment-0"
    if not recorded.is_dir():
        raise ConfigError(f"--replay {run}: no recorded schedule lies there (no {recorded})")
    trained = list(read(recorded / "actor.jsonl"))
    if len(trained) != steps:
        raise ConfigError(
            f"--replay {run}: its first part trained {len(trained)} steps and {steps} are asked for; "
            "a replay follows a run that was not stopped, with as many steps"
        )
    if any("micro_batches" not in step for step in trained):
        raise ConfigError(
            f"--replay {run}: its schedule does not say how the steps were cut into micro-batches; it was "
            "recorded by an older relax, which replays it"
        )
    if lost := losses(recorded / "rollout.jsonl"):
        raise ConfigError(
            f"--replay {run}: it lost {', '.join(sorted(set(lost)))} on its way, and what a lost engine had "
            "decided last is not known; a replay follows a run that lost no engine"
        )
    return recorded


def _fail(text: str, code: int) -> NoReturn:
    _error.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


if __name__ == "__main__":
    app()
