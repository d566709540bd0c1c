"""Constants of inference from nearest neighbours, each with what chose it.

Sizes of tiles steer time and memory alone; all others stand for a choice of the model or of the
search, and results change with them.
"""

# ---- the model -----------------------------------------------------------------------------
#: Noise of u beside f, relative to the variance at each inducing point. Part of the model: bounds
#: the condition number of H points by H / 1e-4, which float32 can factor.
JITTER = 1e-4
#: Where one factor, in float64, serves all rows: with a point a row, u is f and this noise besides
#: that of the observations, and next to little noise 1e-8 is not nothing.
SHARED_JITTER = 1e-12

# ---- which points a prediction uses (neighborhood.py) ----------------------------------------
#: tau. Of kin40k (8 columns; 3000 training rows, 1000 others) the negative log-density of rows left
#: out is 0.150 with and without the fading, 0.159 with a tau of 0.01, 0.197 if all neighbours fade.
FADING = 1e-3
#: Global points: a sine seen but for a gap of two radians, noise of a tenth, has means that change
#: by 20 and more an input unit without them, by 3 with them.
N_GLOBAL = 16
#: They join where they explain so much of the prior's variance, in the mean, at some points.
EXPLAINED, N_COMPARED = 0.5, 1000
#: Ratio of scales: of 105 569 satellite temperatures (Matern 1/2), discs of 2% of the training rows
#: left out have a negative log-density of .737 given their 64 nearest, .663 given 32 nearest and 16
#: each of every 16th and every 256th row; rows left out at random do not tell them apart.
COARSER = 16

# ---- natural-gradient steps (natural.py) -----------------------------------------------------
N_HALVINGS = 4
#: Times the residual asked for will do while the bound rises fast.
HASTE = 5.0

# ---- rows in batches (streaming.py) ----------------------------------------------------------
#: Unexplained part of the prior variance below which a row adds no inducing point.
NOVEL = 1e-3
#: Noise, of the prior variance, that leaves digits to the difference of two inverses.
SEPARABLE = 1e-8

# ---- the search (search.py) ------------------------------------------------------------------
#: Columns up to which a tree is faster than all distances (0.5 s against 10.8 s at d = 8); where
#: some hundred queries must repay its growing.
TREE_COLUMNS, TREE_COLUMNS_FAST = 10, 4
#: Columns and points from which principal components repay their computation (MNIST: 8 s and 66 s),
#: rows that they are of, and the variance they must hold (99.6% of 32 neighbours found).
MANY_COLUMNS, MANY_POINTS, PCA_ROWS, HELD_VARIANCE = 50, 4096, 20_000, 0.9
#: Correlations that differ by less count as equal.
CORRELATION_STEP = 2.0**-36
#: Scaled coordinates are cut here, so that their squares are finite.
BEYOND = 1e100
#: Rows whose standard deviations stand for those of all.
SPREAD_ROWS = 10_000
#: Groups whose minima tell where the smallest values are, at a third of the cost.
GROUP = 16
#: Columns up to which differences are as fast as a matrix product.
DIRECT_COLUMNS = 10

# ---- tiles: numbers in the largest temporary -------------------------------------------------
#: Of conditionals: 2 MB in float64. At H = 64, 2048 rows at once take twice the time a row of 64 at
#: once, for want of cache.
CACHED_NUMBERS = 2**18
TILE = 2**22
SEARCH_CACHED = 2**16
#: Points whose covariances with a union are in memory at once.
UNION_POINTS = 2048
#: Entries of local inverses held while Q is assembled: 400 MB with their indices.
ASSEMBLED = 2**25
