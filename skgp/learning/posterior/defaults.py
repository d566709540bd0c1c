"""Tuned constants of posteriors over hyper-parameters.

"Prototype": the experiment on concrete (n = 1030, one length scale and eight), airfoil (n = 1353,
five) and power plant (n = 8611), which compared samples with exact ones. "Small benchmark": the 180
fits of ``tests/benchmarks/bench_bayesian_small.py``. Constants beside which neither stands are
guards or trade-offs of time that move no result beyond the tolerances stated.
"""

# ---- the log posterior
PRIOR_SD = 1.5  # of a user's own prior that does not say
FEW_ROWS = 200  # up to which overheads outweigh a factorisation
# Rows up to which values alone take less time side by side than one by one: 5 and 66 us at 16 rows,
# 109 and 125 at 45, 185 and 169 at 60, 805 and 432 at 120. Values with gradients never do.
SIDE_BY_SIDE = 50
BATCH = 2**16  # entries of the kernel matrices of a batch, which stay in a core's cache
NEAR_BOUND = 3.0  # standard deviations of a mode from a bound, within which the bound is felt
FARTHEST = 3.0  # of a start from the middle, in coordinates without bounds

# ---- default priors
NOISE_SHARE = 0.1  # of the variance of the targets: the median of the noise
SD, PERIOD_SD = 1.5, 0.1  # of the logarithms: a factor of 20 and one of 1.2 either way
# Of the logarithms of the ratios of length scales, see `Priors`. Log densities of generated data,
# 60 columns and 100 to 200 rows: 4, 12 and 60 relevant ones -.71, -1.08 and -1.46 with 1.1, -.79,
# -1.09 and -1.44 with .8, -1.42, -1.13 and -1.41 with .6 (noise is all that most chains find) and
# -.88, -1.09 and -1.49 where scales are independent.
RATIO_SD = 1.0

# ---- modes, by values and gradients
SEARCH_ROWS = 200  # rows of the first searches: the most that are evaluated side by side
SEVERAL = 1000  # rows up to which more than one mode is looked at on all of them
MAX_ITER, TOL = 100, 1e-6  # gradients of a search, and nats that a step must gain
COARSE_TOL = 1e-3  # nats, of searches whose ends are polished
MORE_STARTS = 4  # drawn from the prior
MOST_MODES = 4
LOST = 12.0  # nats below the best mode at which another no longer counts
APART = 1.0  # distance of two modes, in standard deviations of the better one
HESSIAN_STEP = 0.1  # of the differences: a fraction of the posterior's usual width in log units
LEAST_CURVATURE = 0.1  # a standard deviation of 3 in the logarithm, twice the default priors'

# ---- the start of a search with stochastic gradients, by nearest neighbours
JOINT_ROWS = 500  # rows taken jointly
SAMPLED_ROWS = 2000  # rows given their neighbours
N_NEIGHBORS = 32
ROUNDS, ITERATIONS = 3, 15  # searches, each with neighbours of its own, and steps of each
LEAST_GAIN = 0.1  # nats, of a further round, and of a kernel's search from another's mode

# ---- the search with stochastic gradients (prototype: guards that its set-up needed)
SEARCH_PROBES = 16
ROUGH, FINE = 0.01, 1e-4  # relative residuals of the linear systems, far from the mode and near
TOL_SHARE = 3e-3  # and between, of the distance to it in standard deviations
MODE_TOL = 0.02  # that distance at the end, as far as the probes can tell
MAX_CG = 150  # iterations after which a step is refused
EASY_CG = 15  # iterations to a rough solution that do not call for a larger preconditioner
FIRST_RANK, LARGEST_RANK = 100, 2000
LARGEST_RANK_OF_FEW = 1000  # up to which two thirds of the rows may be pivots, beyond a third
LONGEST = 0.7  # step, in logarithms
OVERSHOT = -0.5  # slope at the end of a step, relative to its start, that refuses it
REFUSALS = 8  # in a row
INFORMATIVE = 0.2  # length of a step, in standard deviations, below which M learns noise from it

# ---- curvature and rank at the mode
CURVATURE_STEP = 0.5  # of the differences, in standard deviations of the search's metric
SET_UP_ROUNDS, NEAR_MODE = 3, 0.7  # of measurements: again where the mode moved further
LEAST_RELATIVE_CURVATURE = 0.1  # relative to that metric
NOISE, NOISE_OF_MANY, MANY = 0.16, 0.5, 4000  # of an estimate, and the rows that are many
MODE_ERROR = 0.002  # variance of the mean gradient for a Newton step, whitened
MOST_MODE_PROBES = 2048  # of that mean
SHORT = 0.3  # length of the last one, in standard deviations
FEW_ESTIMATES, SOME_ESTIMATES = 6, 12  # to judge their noise by, and to report it
SET_UP_TOL = 1e-3  # of the linear systems at the mode

# ---- anchored gradients: the mean there exact to 0.02 standard deviations of the posterior
WIDE_PROBES = 64  # of an estimate where many are averaged
PROBE_COPIES = 4  # numbers that a probe takes a row, beside a tile's share: some thirteen in all
ANCHOR_TOL = 1e-4  # of the linear systems at the anchor
BANK, LARGEST_BANK = 32, 128
BANK_ERROR = 0.005  # variance of the mean over the bank, whitened, that decides between them
MEAN_ERROR, MOST_MEAN_PROBES = 0.0005, 4096  # likewise of the mean gradient at the anchor
BANK_MEMORY = 0.25  # of the budget

# ---- when samples count as those of the posterior
MAX_PARETO_K = 0.7  # Vehtari et al. (2024)
MAX_R_HAT = 1.01  # Vehtari et al. (2021)
DIVERGENT, ASTRAY = 0.01, 0.1  # shares of a chain's iterations: reported, and left out
UNSOLVED = 0.01  # share of the gradients with systems at their cap that is reported
WORST_BANK_ERROR = 0.005  # variance of the mean gradient at the mode: 0.07 deviations

# ---- samples by exact likelihoods
ROUND, ROUND_OF_FEW = 256, 512  # points of importance sampling between two refits
FEW = 45  # rows, whose likelihoods cost less than what goes with a round
# Shares of the points for a law as wide as the prior, kept in every round, and for one that begins
# there and is refitted to what the modes leave over; degrees of freedom. In the small benchmark
# these leave no spread off by more than 10%; no such component and 10 degrees of freedom leave four
# off by 15%. A quarter for the first takes an eighth more points.
WIDE, REST, DF = 1 / 8, 1 / 4, 5
STRETCH = 64  # points between two callbacks where likelihoods take long
# Rows beyond which callbacks are told more often, and chains do not follow points.
LARGE = 1000
PILOT_ROUNDS = 2  # of importance sampling, before "hmc"
# Hyper-parameters of at most 200 rows beyond which chains are the default: of 100 rows importance
# sampling reaches its ESS in most fits of 14 columns, in half of those of 20, and in none of 30,
# where 5120 points are worth 3. Of 300 and 600 rows of five sets of 18 to 26 columns it does in 6
# of 20 fits, and of 1000 rows of 21 columns (sarcos) in 123 s, where chains take 400 s for an ESS
# of 55. One of these (sml, 300 rows, 22 columns, an ESS of 467) had standard deviations 11% too
# small in the median, one of them 30%, against 8000 draws of chains; 1600 draws had them right to
# 10%.
MANY_DIMS = 20
# Share of the ESS asked for below which chains follow points that do not reach it.
FAR_BELOW = 0.5
# Draws of each of these chains, and rows up to which; those that mix have mixed by 350.
DRAWS_OF_MANY, ROWS_OF_MANY = 400, 500
# Effective points of it for each dimension that make proposals and a metric: of 30 and 60 columns
# it has a few, and chains take a quarter of the gradients with the curvature at the mode instead.
PILOT_WORTH = 5.0
LEAST_MODE_SHARE = 0.1  # of the points of importance sampling, for each mode
MOST_POINTS, MOST_DRAWS = 5120, 1000  # of importance sampling; of a chain

# ---- samples by stochastic gradients
STEP, STEP_FEW, FEW_DIMS = 1.0, 1.5, 3  # whitened step, and that for at most three dimensions
MALA_STEP = 1.0
FIRST_STEP, LAST_STEP = 0.1, 1e-4  # Filippone and Engler (2015), section 5.1

# ---- how many samples predict (64: prototype, a mean to 0.02 sd and these to 1%)
PILOT_SAMPLES = 12
LEAST_SAMPLES, MOST_SAMPLES = 8, 64
MEAN_TOL, STD_TOL = 0.03, 0.02  # relative to the standard deviation of an observation
PROBE_ROWS = 32  # of each sort

# ---- plan of a fit
MOST_EXACT = 10_000  # rows up to which a gradient by "cg" costs as much as a few likelihoods
# Rows up to which exact likelihoods are sampled: ten minutes for 4000. Negative log densities
# of 1000 other training rows at the optimum given 2500, exact and by "vecchia": california .627 and
# .627, powerplant -.191 and -.141, sarcos -.535 and -.527; a likelihood takes .25 s and .03 to .1.
MOST_SAMPLED = 4_000
MATRICES = 6  # n x n, of float64, that a likelihood and its gradient hold
COMPARED_ROWS = 300  # on which kernels are compared
# Told beforehand where a matrix is made anew for each product: least and most of what solutions
# took, gradients of fits of 2000 to 20000 rows, and rows that a fit of some minutes has.
PRODUCTS_A_SOLUTION, GRADIENTS_A_FIT, MINUTES_ROWS = (30, 300), 1000, 2000
STATE_RANK = 200  # of the preconditioner of predictions

# ---- Vecchia's approximation
CHOICES = 2  # of neighbours and inducing points, each where a search ended
N_EARLIER, PREDICTIVE = 20, 2  # neighbours of an observation; for each, those of a prediction
# Inducing points of what is sampled, and entries of their features, at most: a density of 18,000
# rows of 8 columns takes 0.27 s without, 1.0 with 200 and 1.6 with 400. Negative log densities as
# above, of optima without, with 100 and with 400: california .625, .627 and .644, powerplant -.121
# and -.141, sarcos -.466 and -.527.
SAMPLED_INDUCING, SAMPLED_FEATURES = 100, 1_000_000
