"""Who is in a run and which version it has: messages, the registry behind the coordinator, a member's link."""
