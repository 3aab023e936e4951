"""Exchange policies, which users call border schemes: how cells of other tiles reach a view, and what returns.

base: what every policy says of itself. names: policies as text. The others: one small class each.
"""
