"""What is measured, each side in a process of its own: our members, and what they are held against."""
