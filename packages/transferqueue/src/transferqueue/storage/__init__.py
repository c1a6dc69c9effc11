"""The storage units of a store: payload, no schedule."""
