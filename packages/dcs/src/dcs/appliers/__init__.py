"""How a version gets into an engine. Each applier is called with what `Subscriber.next` gave, so `follow`
takes it.

All of them check names, shapes and dtypes before anything is touched (`LayoutMismatch`), offer the `layout`
that their `Subscriber` is to have, say in `last` what the newest version cost, and are unusable after an
error in the middle (`ApplyFailed`): an engine with half a version must not serve.
"""

from dcs.appliers.names import NameMap, Prefixed, Renamed, SameNames
from dcs.appliers.sglang.applier import SglangApplier
from dcs.appliers.state_dict import StateDictApplier
from dcs.appliers.version import Applied, Version
from dcs.appliers.vllm import VllmApplier

__all__ = [
    "Applied",
    "NameMap",
    "Prefixed",
    "Renamed",
    "SameNames",
    "SglangApplier",
    "StateDictApplier",
    "Version",
    "VllmApplier",
]
