"""From a module to a graph of operators, and the state of the module that it depends on; no distribution."""
