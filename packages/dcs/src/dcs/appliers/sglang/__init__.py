"""New weights into a running SGLang server through its own HTTP calls; written for and tested with SGLang
0.5.23.
"""

from dcs.appliers.sglang.applier import SglangApplier

__all__ = ["SglangApplier"]
