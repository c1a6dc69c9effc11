"""Which bytes a receiver lacks, of which source: boxes of tensors turned into strided byte ranges."""

from dcs.plan.planner import Plan, plan

__all__ = ["Plan", "plan"]
