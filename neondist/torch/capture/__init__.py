"""Capture of a module as a graph of operators, and the state on which the graph depends; no distribution."""
