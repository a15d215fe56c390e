"""Commands that look at runs, one a file: options and output; the work is elsewhere."""
