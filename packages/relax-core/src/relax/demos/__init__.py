"""Data that the demonstrations bring along, made from what installed packages bundle."""
