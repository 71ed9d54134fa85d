"""Writes a run's series and parameters from the host to the requested loggers, each with its own client."""
