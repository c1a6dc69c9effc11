"""The goals of dcs, a file each; `weights.py` runs them."""
