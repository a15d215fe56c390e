"""Shipped search spaces (`*.yaml`) and jobs (`jobs/*.yaml`), read with importlib.resources."""
