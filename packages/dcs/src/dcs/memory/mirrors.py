"""A subscriber's two buffers on its device: the version that is given out, and the one that is ready."""

import torch

from dcs.layout import Layout
from dcs.memory.device import DeviceMirror
from dcs.memory.slots import Slot

_COPY_SECONDS = 60.0


class Mirrors:
    """At most two. Only the pulling thread calls `stage`.

    Attributes:
        device: where they are.
        absent: why the newest version has no mirror; "" when it has one.
    """

    def __init__(self, layout: Layout, device: str) -> None:
        self._layout = layout
        self.device = device
        self.absent = ""
        self._all: list[DeviceMirror] = []

    def stage(self, slot: Slot, others: list[Slot]) -> None:
        """Copy a whole version to the device, beside what it does; the slot then has it.

        Args:
            others: whose mirrors are in use.

        Raises `Timeout` when the device does not get there.
        """
        used = [other.mirror for other in others]
        mirror = next((mirror for mirror in self._all if mirror not in used), None)
        if mirror is None and len(self._all) < 2:
            mirror, self.absent = DeviceMirror.allocate(self._layout, self.device)
            if mirror is not None:
                self._all.append(mirror)
        elif mirror is None:
            self.absent = "both buffers on the device are in use"
        if mirror is None:
            return
        self.absent = ""
        mirror.reuse()
        mirror.copy(torch.from_numpy(slot.copy.arena.flat))
        mirror.wait(_COPY_SECONDS)
        slot.mirror = mirror

    def close(self) -> None:
        """Give the memory back, once nobody has views of it."""
        for mirror in self._all:
            mirror.close()
        self._all.clear()
