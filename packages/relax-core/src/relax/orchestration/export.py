"""A run's checkpoint as a Hugging Face folder."""

from pathlib import Path

from relax.backends.train.megatron.files import PROGRESS
from relax.config import ConfigError
from relax.engine.checkpoints import TRAINER, Checkpoint, Checkpoints, restore
from relax.orchestration.model_folder import model_folder
from relax.orchestration.run_folder import reopen


def export_run(run: Path, out: Path, step: int | None) -> Checkpoint:
    """Write the weights of a checkpoint with config and tokenizer; returns which one it was.

    Raises:
        ConfigError: no such run or checkpoint, or the folder is there.
    """
    from relax.components.advantages import algorithm_of
    from relax.components.context import Closes
    from relax.components.trainers import alone, is_gang, open_seat, seated, trainer

    folder, config = reopen(run, [], "relax export")
    there = Checkpoints(folder.path, config.checkpoint.keep).all()
    chosen = [c for c in there if step is None or c.step == step]
    if not chosen:
        steps = ", ".join(str(c.step) for c in there) or "none"
        raise ConfigError(
            f"{run} has no checkpoint{'' if step is None else f' of step {step}'}; there are: {steps}"
        )
    if out.exists():
        raise ConfigError(f"{out} is already there; name a new folder")
    if converted(chosen[-1].folder, out, model_folder(config, folder.model)):
        return chosen[-1]
    single = alone(config)  # whatever wrote the checkpoint, one rank reads it
    model = model_folder(config, folder.model)
    if is_gang(single.actor):
        seat = open_seat(single, model)
        backend = seated(seat, algorithm_of(single).loss, "export", folder.logs, start=True)
    else:
        backend = trainer(single, model)
    try:
        restore(chosen[-1].folder, backend)
        backend.export(out)
    finally:
        if isinstance(backend, Closes):
            backend.close()
    return chosen[-1]


def converted(checkpoint: Path, out: Path, model: Path) -> bool:
    """Convert a checkpoint of the megatron backend, tensor by tensor, without its ranks or a GPU; False for
    one of another backend.

    Raises:
        ConfigError: it is damaged, or not of this model.
    """
    ranks = checkpoint / TRAINER
    if not (ranks / PROGRESS).is_file():
        return False
    from relax.backends.train.errors import TrainError
    from relax.backends.train.megatron.convert import convert

    try:
        convert(ranks, out, model)
    except TrainError as error:
        raise ConfigError(f"checkpoint {checkpoint} cannot be exported: {error}") from error
    return True
