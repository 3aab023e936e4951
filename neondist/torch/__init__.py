"""neondist for PyTorch: `import neondist.torch as ndt`; `import neondist` never imports it."""
