"""A run's checkpoint as a Hugging Face folder."""

from pathlib import Path

from relax.config import ConfigError
from relax.engine.checkpoints import Checkpoint, Checkpoints, read_checkpoint
from relax.orchestration.model_folder import model_folder
from relax.orchestration.run_folder import reopen


def export_run(run: Path, out: Path, step: int | None) -> Checkpoint:
    """Write the weights of a checkpoint with config and tokenizer; returns which one it was.

    Raises:
        ConfigError: no such run or checkpoint, or the folder is there.
    """
    from relax.components.assembly import trainer

    folder, config = reopen(run, [])
    there = Checkpoints(folder.path, config.checkpoint.keep).all()
    chosen = [c for c in there if step is None or c.step == step]
    if not chosen:
        steps = ", ".join(str(c.step) for c in there) or "none"
        raise ConfigError(
            f"{run} has no checkpoint{'' if step is None else f' of step {step}'}; there are: {steps}"
        )
    if out.exists():
        raise ConfigError(f"{out} is already there; name a new folder")
    backend = trainer(config, model_folder(config, folder.model))
    state, _ = read_checkpoint(chosen[-1].folder)
    backend.load_state(state)
    backend.export(out)
    return chosen[-1]
