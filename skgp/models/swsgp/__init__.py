"""Sparse-within-sparse GPs: very many inducing points, of which a row sees the nearest."""
