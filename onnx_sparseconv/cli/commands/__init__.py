"""One module a command: its arguments, the call, and what it prints."""
