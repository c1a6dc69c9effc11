"""Which bytes a receiver lacks, of which source: boxes of tensors turned into strided byte ranges."""
