"""Starts and ends processes, here and on other machines."""
