"""Communication of tensors between ranks, and its adjoints for autograd."""
