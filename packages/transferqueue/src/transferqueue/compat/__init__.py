"""The calls of other packages on this store, so that code written for them runs after a change of import.

`compat.transfer_queue` has the KV, client and streaming calls of the PyPI package `transferqueue` 0.1.11.
"""
