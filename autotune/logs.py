"""Other libraries' chatter goes to a file, so that the screen shows the run."""

from __future__ import annotations

import logging
from pathlib import Path


def send_to_file(logger_name: str, path: Path) -> None:
    """All of a library's log messages go to `path`, and nowhere else."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger = logging.getLogger(logger_name)
    logger.handlers = [handler]
    logger.propagate = False
