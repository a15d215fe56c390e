"""The user's own trainer: its command, what is put into it, and what its ranks show of themselves."""
