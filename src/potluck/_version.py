"""The version, in a separate file so that the build can read it without an import."""

__version__ = "0.1.0"
