"""Local kernels that replace slower PyTorch kernels; they do not communicate."""
