"""The meeting of host and guests: the protocol, who computes what, and the threads beside training."""
