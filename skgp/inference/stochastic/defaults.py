"""Tuned constants of the stochastic solvers, each with what chose it."""

BLOCK = 1000
"""Columns a block of a streamed kernel basis: that of the Fourier features."""

SUPPORT_BYTES = 2**28
"""Bytes of the control variate's features kept between iterations (Fourier features only)."""

NEWTON_RANK = 200
"""Support rows that shape the directions of "nystrom": its cost is O(rank^2) a sampled function."""

NEWTON_DAMPING = 1e-3
"""Damping of those directions, relative to the trace of the support rows' Gram matrix: the table of
`gaussian` (8-d waves, kin40k)."""

PROJECTION_JITTER = 1e-6
"""Of K(U, U) in the projection on the support rows, relative; any leaves the estimate unbiased."""

NYSTROM_JITTER = 1e-8
"""Of K(U, U) in the Nystrom control variate of S, relative; any leaves the estimate unbiased."""

PROJECTED_ROWS = 10_000
"""Rows that the projection of the control variate is averaged over: far more than support rows."""

START_ROWS = 500
"""Rows that the first values of dense columns of C are taken from."""

DECAY = 0.3
"""Part of the learning rates left after `max_iter`, Gaussian likelihood (8-d waves, kin40k)."""

HYPER_RATE = 0.01
HYPER_REACH = 10.0
"""Adam's rate for hyper-parameters is ``HYPER_REACH / max_iter``, at most ``HYPER_RATE``: what goes
one way all the time can change by a factor of 200. (The paper has 1e-5 for 1e5 iterations.)"""

COMPLEXITY_EVERY = 10
"""Iterations that a gradient of the complexity serves: theta moves by 1% in each."""

RECENTRED = 20
"""Iterations between control variates while theta moves: a quarter more time at m = 1e5."""

FORGET = 0.95
"""What an iteration keeps of the features' mean squares while theta moves."""

PATIENCE = 300
SMOOTHING = 0.98
"""`tol` stops where the loss, smoothed over 50 iterations, has not fallen for `PATIENCE`."""

SCORE_EVERY = 50
"""Iterations between two scores of held-out rows: a score takes the time of a few iterations."""

SCORE_PATIENCE = 5
"""Scores without a rise after which to stop."""

SCORE_TOL = 1e-3
"""Least fall of the held-out error, relative to its whole fall so far, by default."""

LIKELIHOOD_DECAY = 0.1
"""As `DECAY`, for any likelihood: MNIST, odd or even (the table of `likelihood`)."""

LIKELIHOOD_HYPER_RATE = 1e-3
"""Adam's rate for hyper-parameters under any likelihood."""

LIKELIHOOD_START_ROWS = 100
LIKELIHOOD_START_FUNCTIONS = 1000
"""Rows and functions that the first variances are estimated from."""

SLOWEST = 0.05
"""Least weight of a new term in the running mean of precisions, which must forget the first
iterations."""
