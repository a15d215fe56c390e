"""A port for a process group of a test."""

from __future__ import annotations

import random
import socket

BELOW_EPHEMERAL = (20_000, 32_000)
"""The kernel gives those from 32,768 on to whoever connects meanwhile: seconds pass before the ranks listen."""


def free_port() -> int:
    """A TCP port that was free a moment ago, and that only a test would take."""
    rng = random.SystemRandom()
    while True:
        port = rng.randint(*BELOW_EPHEMERAL)
        with socket.socket() as sock:
            try:
                sock.bind(("", port))
            except OSError:
                continue
            return port
