"""Constants of the weight space, each with what chose it."""

MEMORY_BUDGET = 2**29
"""Bytes of features that a streamed computation may hold at once."""

TILE_BYTES = 2**25
"""Features of a tile of observations; larger tiles leave the processor's caches and gain
nothing."""

GRAM_TILE = 512
"""Columns of a tile of a Gram matrix: full matrix-multiply speed, little of the upper triangle."""

PRODUCT_BYTES = 2**27
"""Features times roots of covariances, held at once when variances are predicted."""

ROWS_FLOAT32 = 4096
"""Observations of a float32 sum before float64 takes over: a relative error of 1e-6 in a Gram
matrix."""

SINGLE_TOLERANCE = 1e-3
"""Largest error of a float32 feature, relative to the prior's standard deviation, that passes."""

PRECONDITIONER_ROWS = 2000
"""Observations in the preconditioner of conjugate gradients, where memory allows."""

RIDGE_FACTOR = 4
"""Ridge of that preconditioner, in units of noise n / p: needed half the iterations of the plain
noise on n = 5000, m = 10000; 1 and 4 were about the same."""

N_DIRECTIONS = 4
"""Sweep displacements kept by Gauss-Seidel: on small problems 7 to 16 times fewer sweeps than
without."""

RATIO_HALF_WIDTH = 1e3
"""Factor to either side within which the ratio of noise to prior variance is searched at once."""

RATIO_INTERVALS = 4
"""Such intervals at the most."""

RATIO_ROUNDING = 0.1
"""Share of the rounding of a Gram matrix below which no ratio is tried: an error of 6 nats there
with float32 features of kin40k (n = 36000, m = 2048)."""

ROUNDINGS = 10
"""Units in the last place by which equal targets may differ."""

# ---- Laplace noise ---------------------------------------------------------------------------

N_MAJORISED = 3
"""First steps that majorise; 0 to 10 were compared on kin40k and pol."""

SMALLEST_STEP = 1e-3
"""Natural-gradient step at which the ascent has converged."""

LEAST_SCALE = 1e-6
"""Of b, relative to the targets: a perfect fit would send it to 0."""

LEAST_STD = 1e-6
"""Of a latent value, relative to b."""

SITE_TILE_BYTES = 2**27
"""Features of a tile in a pass that sums sites up."""

# ---- Newton's method -------------------------------------------------------------------------

EXACT_FLOPS = 1e10
"""Cost of the Hessians and factors of one step up to which they are formed: about 0.1 s."""

REFRESH_STEPS = (0, 3, 10, 20)
"""Steps with a new preconditioner. Factors at 0 and 3 did as well as at 0, 1 and 3 on MNIST (m =
2000, n = 10000); most fits end before the third, by when Hessians change little."""

PRECONDITIONER_DRAWS = 6000
"""Observations expected in the subsampled Hessian."""

MAX_CG = 8
"""Conjugate gradients in a Newton step (design experiments on MNIST, odd or even)."""

FORCING = 0.3
"""Relative residual of a Newton equation far from the mode."""

MAX_HALVINGS = 30
"""Of a step."""

SUFFICIENT = 1e-4
"""Share of the decrease promised by the slope that a step must attain (Armijo)."""

LOSS_ROUNDING = 1e-14
"""Relative error of a loss: a decrease below it cannot be seen."""

ONLINE_STEPS = 50
"""Newton steps for a batch of a stream."""

ONLINE_TOL = 1e-8
"""Nats promised by the last of them; the distance to the mode, in posterior standard deviations, is
then of the order of this number."""
