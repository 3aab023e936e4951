"""Intermediate representation of a captured module: layouts, transfers, steps, registry of rules; no execution."""
