"""Cost models of the strategies to train on a fleet. PURE."""
