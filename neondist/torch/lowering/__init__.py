"""From operators to the steps of a plan, and the costs of a plan; single operators are in rules/."""
