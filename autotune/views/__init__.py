"""A run in the form that other tools open: views of the history, made anew at any time and never read back."""
