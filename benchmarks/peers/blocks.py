"""A peer as a child process that works in blocks, and sleeps between them while the other side works."""

from pathlib import Path

from measure.child import READY_SECONDS, Child


class Peer(Child):
    """`script WORK` as a context manager. One line in asks for a block, one line out answers it."""

    def __init__(self, script: Path, work: str) -> None:
        super().__init__(script, work, environment={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})

    def block(self, *, steps: int, threads: int, seconds: float) -> dict[str, list[float]]:
        """Have a block done.

        Args:
            steps: at most.
            threads: of torch.
            seconds: after which the block ends with the step it is in.

        Returns:
            A value for each step done: `walls`, `cpus`, `rewards`, `tokens`.

        Raises:
            ChildError: the peer failed or did not answer.
        """
        return self.ask(seconds + READY_SECONDS, steps=steps, threads=threads, seconds=seconds)
