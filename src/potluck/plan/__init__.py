"""Cost models of the ways to train on a fleet, pure. It runs nothing and measures nothing."""
