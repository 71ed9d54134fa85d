"""Frozen data that is passed between the packages, written to disk or sent to other machines, and its checks."""
