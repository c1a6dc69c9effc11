"""Host memory for whole versions: flat arenas, and who is reading them."""
