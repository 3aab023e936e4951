"""Lowering of operators to the steps of a plan, and costs of a plan; the rules of operators are in rules/."""
