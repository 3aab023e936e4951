"""Execution of a plan at once, in blocks, in strips or in fused segments; what users hold is in module/."""
