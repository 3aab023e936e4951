"""Output to the terminal: plain lines, tables and progress."""
