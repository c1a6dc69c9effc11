"""How weights travel: one TCP connection per subscriber, blocking sockets, one thread each side.

A connection opens with a hello (magic, protocol version, a msgspec struct) that is welcomed or refused in
words. Then the subscriber sends fixed 32-byte requests and the publisher answers each chunk with a 12-byte
header and its bytes, straight out of the staging buffer and straight into the other side's.
"""
