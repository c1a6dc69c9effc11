"""The goals of transferqueue, a file each; `queue.py` runs them."""
