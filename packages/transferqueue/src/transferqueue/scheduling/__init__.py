"""Who gets which sample: a state machine of one partition, without sockets, clocks or payload."""
