"""The training loop and what surrounds it: steps, data, checkpoints, recipes. It knows no command line."""
