"""The driver: decides what to try, and what the results mean.

From Python: `from autotune import load_job, tune, load_run`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.api import Run, load_job, load_run, tune

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "load_job", "load_run", "tune"]


def __getattr__(name: str) -> Any:
    """Imports what is slow when it is asked for: `autotune --help` needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autotune import api

    return getattr(api, name)
