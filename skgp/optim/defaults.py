"""Constants of the minimisers; those of textbooks unless a line says otherwise."""

# ---- Adam (loop.py)
BLOCK = 2**15  # numbers of a parameter moved together: the four arrays of a step stay in cache
BOUNDED_MOMENTS = 0.9, 0.99  # of minibatches
SNAPSHOT_EVERY = 10  # iterations between two copies of good parameters

# ---- searches along a direction (bfgs.py, scoring.py)
ARMIJO = 1e-4
SHORTENED = 0.1, 0.5  # of a step refused, at least and at most
FIRST_STEP = 0.5  # in each coordinate, without any curvature seen
LEAST_CURVATURE = 1e-10  # cosine of a step and the change of the gradient that says something
LONGEST_STEP = 2.0  # of a step, in each coordinate
SHORTEST_STEP = 1e-10  # of t, below which a search has ended

# ---- L-BFGS-B (bfgs.py)
HISTORY_NUMBERS = 5e7  # floats that the curvature pairs may take
N_PAIRS = 50
REFUSAL = 1e3  # times the loss, above the best: what a refused point is given
STANDS_STILL = 5  # evaluations in a row that change the loss by less than the tolerance

# ---- Anderson's mixing (scoring.py): of 60 and of 1000 labels the searches took .61 to .73 of the
# steps of the sites that plain iterations take, with 3 as with 5; of counts and outliers .8 to 1.1
MIXED_PLACES = 3
MIXING_RIDGE = 1e-10  # of the Gram matrix of changes, relative to its diagonal
