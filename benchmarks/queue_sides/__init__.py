"""What is measured, each side in a process of its own: the peers, the bare transports, and our own users."""
