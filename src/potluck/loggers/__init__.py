"""A run's series and parameters, written by the host to the loggers that were asked for, each by its own client."""
