"""Who is in a run and which version it has: messages, the coordinator's state machine, a member's link to it."""
