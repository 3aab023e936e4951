"""Properties of arrays: namespaces, precisions, and random numbers keyed by seed and global index."""
