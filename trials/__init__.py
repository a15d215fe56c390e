"""The worker: everything that runs on a rank. Imports nothing of `autotune`."""
