"""Connects host and guests: the protocol, who computes what, and the threads that run beside training."""
