"""Constants of the minimisers; those of textbooks unless a line says otherwise."""

# ---- Adam (loop.py)
BLOCK = 2**15  # numbers of a parameter moved together: the four arrays of a step stay in cache

# ---- searches side by side (bfgs.py)
ARMIJO = 1e-4
LONGEST_STEP = 2.0  # of a step, in each coordinate
SHORTEST_STEP = 1e-10  # of t, below which a search has ended

# ---- L-BFGS-B (bfgs.py)
HISTORY_NUMBERS = 5e7  # floats that the curvature pairs may take
N_PAIRS = 50
