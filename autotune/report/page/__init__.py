"""The report as one HTML page that opens from disk: everything is inside it, and it asks no network for anything."""

from autotune.report.page.page import make_page

__all__ = ["make_page"]
