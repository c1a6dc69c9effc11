"""Requests and replies: what they are, and the two ends of a connection."""
