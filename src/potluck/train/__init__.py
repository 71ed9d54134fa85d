"""The training loop and its parts: steps, data, checkpoints, recipes. Usable without the command line."""
