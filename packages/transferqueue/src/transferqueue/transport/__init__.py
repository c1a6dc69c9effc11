"""How payload gets from a producer into the arenas of a store, and from there to a reader."""
