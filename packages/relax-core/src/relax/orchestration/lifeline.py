"""What ties the deployments of a run to its driver. In a file of its own, as its process imports no more."""

import asyncio


class Lifeline:
    """A Ray actor of the run's driver, which dies with it: deployments of Serve would outlive a driver that
    is killed, and keep what they reserve.
    """

    async def wait(self) -> None:
        """Never returns; raises RayActorError in who waits when the driver is gone."""
        await asyncio.Event().wait()
