"""Communication of tensors between ranks, with its adjoints for autograd; no decisions about what to send."""
