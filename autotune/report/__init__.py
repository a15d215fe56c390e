"""What people read: the screen while a run goes on, and tables afterwards."""
