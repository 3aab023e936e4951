"""Output to the terminal: plain lines and tables."""
