"""Exchange policies (border schemes): exchange of halo cells and of their gradients.

base: the base class. names: policies as text. Every other module contains one policy.
"""
