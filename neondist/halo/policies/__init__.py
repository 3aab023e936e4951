"""Exchange policies (border schemes), which exchange halo cells and their gradients.

base: the base class. names: policies as text. narrow_halo: `Halo` for 16-bit operands. Other modules: one policy each.
"""
