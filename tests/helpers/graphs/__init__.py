"""Generated networks, compared with PyTorch's autograd for all layers, grids and border schemes.

case: a network and its run, as plain data. draw: random cases. build: models of a case. oracle: reference networks in
PyTorch. execution: runs and their results. predicted_bytes: bytes predicted by `neondist check`. check: comparison of a
case. shrink: minimisation of failing cases. layouts: memory layouts of arrays.

Only the public interface is used, except in predicted_bytes.
"""
