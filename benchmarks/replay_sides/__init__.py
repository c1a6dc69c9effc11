"""The two sides of benchmarks/replay.py, and the mixture of experts that both start from."""
