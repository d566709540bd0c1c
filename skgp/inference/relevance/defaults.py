"""Tuned constants of the relevance vector machines, each with what chose it."""

MAX_ROWS = 20_000
"""Rows up to which each of them is a candidate by default."""

CANDIDATES = 2_000
"""Candidates drawn by default from more rows."""

CHUNK = 20_000
"""Rows of a memory map read at once."""

ALIGNED = 1e-3
"""Functions whose cosine to one in the model is above 1 less this are not added beside it."""

RESOLUTION = 1e-8
"""Part of a column's square beyond rounding, below which it adds nothing new."""

NOISE_FLOOR = 1e-6
"""Least noise variance that is learned, as a part of the mean square of y."""

START_NOISE = 0.1
"""First noise variance of the sequential algorithm, as a part of the mean square of y."""

LOW_NOISE = 1e-2
"""Noise, as a part of the mean square of y, below which a lower start may do better."""

LEAST_FREE = 1e-9
"""Least number of rows beyond the weights that they determine."""

REFRESH = 10
"""Steps between updates of the noise and exact recomputations."""

INNER_STEPS = 5
"""Steps a refresh of mode and curvatures, at most, of a classifier."""

NEWTON_STEPS = 50
HALVINGS = 30
"""Of the search for the mode of a classifier, at most; of each of its steps."""

MIN_CURVATURE = 1e-12
"""Least curvature of a row: the targets of the regression at a mode divide by it."""

PRUNE = 1e-2
"""Part of its weight that the data must determine for a function to stay, by gradients."""

PRUNE_EVERY = 25
"""Iterations between prunings."""

SGD_DECAY = 0.1
"""Of the learning rate of the mean, over all iterations."""

SGD_START_NOISE = 0.5
"""First noise variance of the stochastic search, as a part of the mean square of y."""

NOISE_RATE = 0.1
"""Of the moving average that its noise variance is."""
