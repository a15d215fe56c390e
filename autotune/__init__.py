"""The driver: decides what to try, and what the results mean."""

__version__ = "0.1.0"
