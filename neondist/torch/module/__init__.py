"""The user-facing distributed module, with its losses, loaders and weights files."""
