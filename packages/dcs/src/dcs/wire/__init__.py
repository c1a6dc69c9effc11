"""How weights travel: chunks over blocking sockets, a thread a connection; mapped memory; broadcasts.

A connection opens with a hello (magic, protocol version, a msgspec struct) that is welcomed or refused in
words. Then the reader sends requests of one fixed size (`frames.py`), for chunks of the whole buffer or of a
selection that it has sent before, and the source answers each chunk with a header and its bytes, straight out
of its arena and straight into the reader's. Over a Unix socket it may ask for the arena itself instead.
"""
