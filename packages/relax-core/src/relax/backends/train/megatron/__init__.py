"""The `megatron` backend: megatron-core models over tensor, pipeline, context, expert, data parallel ranks.

`MegatronRank` (rank.py) is one rank; `relax.backends.train.gang` drives them. Nothing of megatron-core is
patched. What it leaves open is filled with modules of our own: attention that packs sequences and splits them
over context-parallel ranks without Transformer Engine, norms that know sequence parallelism, rotary positions
as Hugging Face counts them.
"""
