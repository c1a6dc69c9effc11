"""Who is in a run and which version it has: messages, registry, coordinator, and a member's link to it."""
