"""Communication of tensors between ranks, and its adjoints for autograd; what is sent is decided elsewhere."""
