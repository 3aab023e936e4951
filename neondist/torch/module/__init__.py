"""The distributed module that users hold, and what they use with it: losses, loaders, weights files."""
