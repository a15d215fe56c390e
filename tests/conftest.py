"""Property tests draw the same examples each time, so that a change fails for what it did.

`HYPOTHESIS_PROFILE=explore make test` draws new ones.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
