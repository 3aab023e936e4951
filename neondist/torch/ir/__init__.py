"""Intermediate representation of captured modules: layouts, values, steps, and the registry of rules."""
