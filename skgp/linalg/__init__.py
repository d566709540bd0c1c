"""Linear algebra on tensors and matvec closures; no Gaussian-process words."""
