"""Constants of inference in state space, each with what chose it."""

# ---- the smoother: timed on one core over n = 1e3 to 1e6 and d = 1 to 8, results equal
#: Chunks, few enough for the working set of a step to stay in cache.
MAX_CHUNKS = 3840
#: Points of a chunk, where the tree over the chunks costs about as much as they do.
MIN_LENGTH = 6
#: What the arrays over a tile of chunks may take.
TILE_BYTES = 2**29
#: Distinct gaps up to which transitions are looked up.
MAX_TABLE = 512
#: Of ``|1 + weight * var|``, by whose square a variance loses digits: half of them here.
LEAST_PIVOT = 3e-5
#: Misfit of what is known between two chunks, of its largest entry, that tells of lost digits.
MISFIT = 1e-5

# ---- short series by one Cholesky factor
#: Times at which it costs nearly as much as a sweep.
MAX_TIMES = 256
#: Of weight to prior precision: the condition number of B is m times that.
MAX_RATIO = 1e4

# ---- natural-gradient ascent of sites: labels, counts and Student-t noise at n = 100 to 1e5
#: Rows whose expectations are taken together: temporaries of 0.5 MB.
TILE = 2**16
#: Nats an observation, gained by a step, at which caution about convex rows is given up.
SETTLED = 1e-2
#: Step at which the search is given up.
SHORTEST = 2.0**-10
#: Of the ELBO's terms, which cancel: what it may fall by.
ROUNDING = 1e-12
#: Of the precision of f that stays, at least, when a row is left out: sites may not have converged.
LEAST_SHARE = 0.01

# ---- states at knots
#: Knots a length scale that leave nearly nothing to be gained by more (ELBO of drawn series).
PER_SCALE = 10
#: Inducing states by default.
MAX_KNOTS = 1000
#: Pairs of times that are worked on together.
PAIRS = 2**14
#: Entries of the largest temporary of a tile of rows: 2 MB.
ENTRIES = 2**18
#: Times in an interval beyond which joint draws divide it.
CROWDED = 64

# ---- sites of rows that come later, which are never looked at again
#: Passes of the search, and its least gain in nats an observation.
ADDED_ITER, ADDED_TOL = 50, 1e-10

# ---- additive models
#: Bins that a column keeps where all columns together would have too many.
FEWEST_BINS = 16
#: Cells of cross tables that are counted at once: they stay in the cache.
CELLS = 2**16
#: Numbers of a block of covariances, whose temporaries stay in the cache.
COVARIANCES = 2**16
#: Of a batch of predictions: rows, values whose covariance with the bins is held, and numbers of
#: the covariances with training rows.
BATCH_ROWS, BATCH_VALUES, BATCH_NUMBERS = 2**14, 1024, 2**22
