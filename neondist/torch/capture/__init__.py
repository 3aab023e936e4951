"""Capture of a module as a graph of operators, and checks of the state on which the graph depends."""
