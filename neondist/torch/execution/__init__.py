"""Execution of plans: whole tiles, blocks, strips and fused segments. The user-facing module is in module/."""
