"""Generated networks, held against PyTorch's autograd: whatever the layers, grid and scheme, the numbers are the same.

case: a network and all that is done with it, as plain data. draw: random ones. build: neondist's models of them.
oracle: the same in PyTorch, from formulas. play: what is done, and what came of it. told: what `neondist check` says.
check: one case, all comparisons. shrink: a smaller case that fails too. layouts: arrays that are not plain.

Only names of the public interface are used here, but for `told`.
"""
