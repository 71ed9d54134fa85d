"""Emulates a fleet on one Linux box: machines and links, and commands that run on them."""
