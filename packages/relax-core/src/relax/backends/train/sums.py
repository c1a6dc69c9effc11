"""Loss sums of several micro-batches or replicas as one."""

from collections.abc import Iterable

import torch

from relax.algorithms.spec import LossOutputs


def add(outputs: Iterable[LossOutputs]) -> LossOutputs:
    """Sums and counts added in the order given; of metrics that end in `_max`, the largest."""
    loss, count = torch.zeros((), dtype=torch.float64), 0.0
    metrics: dict[str, tuple[float, float]] = {}
    for output in outputs:
        loss = loss + output.loss.detach().double().cpu()
        count += output.count
        for name, (total, number) in output.metrics.items():
            seen = metrics.get(name)
            if seen is None:
                metrics[name] = (total, number)
            elif name.endswith("_max"):
                metrics[name] = (max(seen[0], total), number)
            else:
                metrics[name] = (seen[0] + total, seen[1] + number)
    return LossOutputs(loss, count, metrics)
