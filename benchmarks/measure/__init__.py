"""How a benchmark measures what it does not run itself: process trees, and `relax train` as a command."""
