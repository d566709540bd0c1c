"""Learning of state-space models: evidence as a function of kernel and likelihood."""
