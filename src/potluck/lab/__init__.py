"""Emulates a fleet on one Linux machine: machines, links, and commands that run on them."""
