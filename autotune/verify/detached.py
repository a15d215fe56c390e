"""python -P -m autotune.verify.detached ORDER.json: leaves the process that follows the real run, and returns."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    from autotune.verify.follow import main  # after the return: it takes its time

    main(Path(sys.argv[1]))
