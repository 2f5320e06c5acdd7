"""The version, stated here alone: the package's metadata reads it from this file."""

__version__ = "0.1.0"
