"""From what a user hands to `put` to columns of bytes, and back."""
