"""What to try next: Optuna behind one small interface, and what needs no trying."""
