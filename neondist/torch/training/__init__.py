"""PyTorch modules in experiments, scripts and sessions: everything that belongs to a training loop."""
