"""Tuned constants of inference, each with what chose it.

Sizes of tiles steer time and memory alone; where the budget is small, it bounds them too
(`skgp.linalg.runtime.tile_rows`).
"""

import numpy as np
import torch

# ---- sparse posteriors
# Jitter of Kuu relative to its mean diagonal. It bounds ||L^-1||, by which the rounding of kernel
# values is magnified: with 1e-8 searches for q(u) and inducing points stop where they begin.
JITTER = {torch.float64: 1e-6, torch.float32: 1e-4}
# Numbers an observation and inducing point that sums over the observations hold: K, Phi, L^-1 K'.
FEATURES_OF_ROW = 3
LEAST_CALIBRATED_NOISE = 1e-8  # after a square loss: the residuals of a constant are 0
RIDGE_RATIOS = np.logspace(-6, 3, 46)  # noise over prior variance, where the search of it begins

# ---- exact posteriors
# Prior variance over the noise of an observation from which observations are orthogonalised row by
# row: in K + D and in normal equations eps times this, 2e-4, is lost.
NEARLY_EXACT = 1e12
# Prior variance, of the largest, that pivots may leave there: kernel values are known to 1e-16, so
# that features keep nine digits.
PIVOT_TOLERANCE = 1e-14
RESIDUAL = 1e-2  # that conjugate gradients leave: of targets by default, of draws at most

# ---- weight space
PIVOT_SHARE = 0.25  # of the budget: a partial Cholesky factor of K
# Of the budget: features that a design keeps between passes, and what a sweep of Gauss-Seidel holds
# of them or keeps of their factors.
KEPT_FEATURES, KEPT_FACTORS = 0.5, 0.125
# Features of a tile of observations; larger tiles leave the processor's caches and gain nothing.
TILE_BYTES = 2**25
# What a float32 tile of features is made of, in float64: covariances and those whitened.
MADE_OF = 4
# Of a chunk whose Gram matrix is added up, Hessians that are formed together, and a preconditioner.
CHUNK_BYTES, HESSIAN_BYTES, PRECONDITIONER_BYTES = 2**29, 2**29, 2**29
# Columns of a tile of a Gram matrix: full matrix-multiply speed, little of the upper triangle.
GRAM_TILE = 512
# Features times roots of covariances, held at once when variances are predicted.
PRODUCT_BYTES = 2**27
# Observations of a float32 sum before float64 takes over: a relative error of 1e-6 in a Gram
# matrix.
ROWS_FLOAT32 = 4096
# Largest error of a float32 feature, relative to the prior's standard deviation, that passes.
SINGLE_TOLERANCE = 1e-3
# Observations in the preconditioner of conjugate gradients, where memory allows.
PRECONDITIONER_ROWS = 2000
# Ridge of that preconditioner, in units of noise n / p: needed half the iterations of the plain
# noise on n = 5000, m = 10000; 1 and 4 were about the same.
RIDGE_FACTOR = 4
# Sweep displacements kept by Gauss-Seidel: on small problems 7 to 16 times fewer sweeps than
# without.
N_DIRECTIONS = 4
# Factor to either side within which the ratio of noise to prior variance is searched at once.
RATIO_HALF_WIDTH = 1e3
RATIO_INTERVALS = 4  # such intervals at the most
# Share of the rounding of a Gram matrix below which no ratio is tried: an error of 6 nats there
# with float32 features of kin40k (n = 36000, m = 2048).
RATIO_ROUNDING = 0.1
ROUNDINGS = 10  # units in the last place by which equal targets may differ

# ---- Laplace noise
N_MAJORISED = 3  # first steps that majorise; 0 to 10 were compared on kin40k and pol
SMALLEST_STEP = 1e-3  # natural-gradient step at which the ascent has converged
LEAST_SCALE = 1e-6  # of b, relative to the targets: a perfect fit would send it to 0
LEAST_STD = 1e-6  # of a latent value, relative to b
SITE_TILE_BYTES = 2**27  # features of a tile in a pass that sums sites up

# ---- Newton's method
# Cost of the Hessians and factors of one step up to which they are formed: about 0.1 s.
EXACT_FLOPS = 1e10
# Steps with a new preconditioner. Factors at 0 and 3 did as well as at 0, 1 and 3 on MNIST (m =
# 2000, n = 10000); most fits end before the third, by when Hessians change little.
REFRESH_STEPS = (0, 3, 10, 20)
PRECONDITIONER_DRAWS = 6000  # observations expected in the subsampled Hessian
# Of features that are not kept: flops that making one costs (6 ns of a Matern covariance), and
# passes over all of them that a preconditioner may take the time of.
MADE_FLOPS, MADE_PASSES = 300, 4
MAX_CG = 8  # conjugate gradients in a Newton step (design experiments on MNIST, odd or even)
FORCING = 0.3  # relative residual of a Newton equation far from the mode
MAX_HALVINGS = 30  # of a step
SUFFICIENT = 1e-4  # share of the decrease promised by the slope that a step must attain (Armijo)
LOSS_ROUNDING = 1e-14  # relative error of a loss: a decrease below it cannot be seen
ONLINE_STEPS = 50  # Newton steps for a batch of a stream
ONLINE_TOL = 1e-11  # gradient at the last of them, relative to that at the posterior before

# ---- relevance vector machines
# Features that are kept; beyond them the Gram matrix is, if it is no greater.
DICTIONARY_BYTES = 2**29
MOST_CANDIDATES = 20_000  # rows up to which each of them is a candidate by default
CANDIDATES = 2_000  # candidates drawn by default from more rows
MAPPED_ROWS = 20_000  # rows of a memory map read at once
# Functions whose cosine to one in the model is above 1 less this are not added beside it.
ALIGNED = 1e-3
RESOLUTION = 1e-8  # part of a column's square beyond rounding, below which it adds nothing new
NOISE_FLOOR = 1e-6  # least noise variance that is learned, as a part of the mean square of y
# First noise variance of the sequential algorithm, as a part of the mean square of y.
START_NOISE = 0.1
LEAST_FREE = 1e-9  # least number of rows beyond the weights that they determine
REFRESH_EVERY = 10  # steps between updates of the noise and exact recomputations
INNER_STEPS = 5  # steps a refresh of mode and curvatures, at most, of a classifier
# Of the search for the mode of a classifier, at most; of each of its steps.
MODE_STEPS = 50
MODE_HALVINGS = 30
# Least curvature of a row: the targets of the regression at a mode divide by it.
MIN_CURVATURE = 1e-12
PRUNE = 1e-2  # part of its weight that the data must determine for a function to stay, by gradients
PRUNE_EVERY = 25  # iterations between prunings
PRECISION_RATE = 0.1  # of Adam on log s: larger keeps fewer, less well placed vectors
SGD_DECAY = 0.1  # of the learning rate of the mean, over all iterations
# First noise variance of the stochastic search, as a part of the mean square of y.
SGD_START_NOISE = 0.5
NOISE_RATE = 0.1  # of the moving average that its noise variance is

# ---- stochastic gradients
BLOCK = 1000  # columns a block of a streamed kernel basis: that of the Fourier features
# On a device that is not the CPU: bytes of samples drawn ahead and moved together, 16000 iterations
# of 500 rows; iterations between two looks at the loss where `tol` asks for it.
AHEAD_BYTES, LOOK_EVERY = 2**26, 50
# Support rows that shape the directions of "nystrom": its cost is O(rank^2) a sampled function.
NEWTON_RANK = 200
# Damping of those directions, relative to the trace of the support rows' Gram matrix: the table of
# `gaussian` (8-d waves, kin40k).
NEWTON_DAMPING = 1e-3
# Of K(U, U) in the projection on the support rows, relative; any leaves the estimate unbiased.
PROJECTION_JITTER = 1e-6
# Of K(U, U) in the Nystrom control variate of S, relative; any leaves the estimate unbiased.
NYSTROM_JITTER = 1e-8
# Rows that the projection of the control variate is averaged over: far more than support rows.
PROJECTED_ROWS = 10_000
START_ROWS = 500  # rows that the first values of dense columns of C are taken from
# Part of the learning rates left after `max_iter`, Gaussian likelihood (8-d waves, kin40k).
DECAY = 0.3
# Adam's rate for hyper-parameters is ``HYPER_REACH / max_iter``, at most ``HYPER_RATE``: what goes
# one way all the time can change by a factor of 200. (The paper has 1e-5 for 1e5 iterations.)
HYPER_RATE = 0.01
HYPER_REACH = 10.0
# Iterations that a gradient of the complexity serves: theta moves by 1% in each.
COMPLEXITY_EVERY = 10
# Visits that a sampling unit has had on average before others are added to those drawn from. RMSE
# on held-out training rows of kin40k, m = 1e6, 240 iterations: .244 with 40, .247 with 160.
VISITS = 40
# Iterations between two projections of the control variate while theta moves: 5% of their time.
PROJECTED = 20
FORGET = 0.95  # what an iteration keeps of the features' mean squares while theta moves
# `tol` stops where the loss, smoothed over 50 iterations, has not fallen for `PATIENCE`.
PATIENCE = 300
SMOOTHING = 0.98
# Iterations between two scores of held-out rows: a score takes the time of a few iterations.
SCORE_EVERY = 50
SCORE_PATIENCE = 5  # scores without a rise after which to stop
SCORE_TOL = 1e-3  # least fall of the held-out error, relative to its whole fall so far, by default
# As `DECAY`, for any likelihood: MNIST, odd or even (the table of `likelihood`).
LIKELIHOOD_DECAY = 0.1
# Rows and functions that the first variances are estimated from.
LIKELIHOOD_START_ROWS = 100
LIKELIHOOD_START_FUNCTIONS = 1000
# Least weight of a new term in the running mean of precisions, which must forget the first
# iterations.
SLOWEST = 0.05

# ---- state space, the smoother: timed on one core over n = 1e3 to 1e6, d = 1 to 8, results equal
MAX_CHUNKS = 3840  # chunks, few enough for the working set of a step to stay in cache
#: Points of a chunk, where the tree over the chunks costs about as much as they do: ``LENGTH d
#: sqrt(n)`` within these. Of 6, 12, ..., 192 it was within a fifth of the best at d = 2, 5, 9, 15
#: and 40 and n = 1e3, 1e4 and 5e4; 6 took 2.5 times as long at d = 15, n = 1e4.
MIN_LENGTH, LENGTH, MAX_LENGTH = 6, 0.02, 48
CHUNKS_BYTES = 2**29  # what the arrays over a tile of chunks may take
MAX_TABLE = 512  # distinct gaps up to which transitions are looked up
#: Of ``|1 + weight * var|``, by whose square a variance loses digits: half of them here.
LEAST_PIVOT = 3e-5
#: Misfit of what is known between two chunks, of its largest entry, that tells of lost digits.
MISFIT = 1e-5

# ---- state space, long series by dense factors of chunks: timed on one core, n = 1e4 and 1e5
#: Points, and points over the square of the number of states, up to which they take less time than
#: steps from point to point; and states from which they always do, at irregular and regular times.
#: At n = 1e4 (1e5) 15 beside 22 ms (142, 79) with four states, 14, 42 (135, 210) with six, 33, 135
#: (342, 1800) with 17; at regular times 16, 19 (149, 63), 14, 28 (135, 107) and 32, 99 (342, 823).
FEW_POINTS, POINTS_A_STATE, DENSE_STATES = 3000, 600, (6, 9)
REGULAR = 1e-9  # of gaps, by which they differ, relative, at regular times
#: Points of a chunk, of few states and of as many as these; halved where gaps are wide.
DENSE_LENGTHS, MANY_STATES, SHORTEST_LENGTH = (24, 48), 12, 12
TILE_MATRICES = 300_000  # entries of the matrices of a tile of chunks, which stay in the cache
#: Of weight to prior precision: log Z then has errors of 4e-10 of itself, gradients of 1e-6. What a
#: site may exceed its value at the centre by, in nats.
LARGEST_RATIO, FARTHEST_TOP = 1e7, 1e6
SMALL_WEIGHT = 1e-2  # of weight to prior precision, below which a variance is not what N_ff leaves

# ---- state space, short series by one Cholesky factor
#: Times at which it costs nearly as much as a sweep: of few states (evidence and gradient at 350
#: times 4-6 ms beside 8-14, at 450 6-11 beside 8-15), and of d states, twice d^1.5. Beyond the last
#: the distances and their slopes fill 200 MB.
MAX_TIMES, TIMES_A_STATE, MOST_TIMES = 400, 2.0, 1024
#: Of weight to prior precision: the condition number of B is m times that. Log evidence of 60 and
#: 250 times then has errors of 1e-8 of itself, gradients of 1e-6 (Matern, RBF, periodic, rational
#: quadratic and trend, against the filter), a hundredth of what a search stops at.
MAX_RATIO = 1e9
#: Where kernels are compared, of the variance to that of the least certain step ahead: errors of
#: 1e-14 nats times it (trend, Matern 5/2 and seasons of 60 and 150 times, by 40 digits), 1e-4 nats
#: with RBF. Beyond, the filter takes some ten times as long.
ROUGH_RATIO = 1e12
#: Covariances with new times that predictions hold at once, of the size of a cache. More are those
#: of the filter, which is quicker, below a ratio as above at which variances before the first time
#: keep six digits (by 50 digits: trend, Matern and season of 50 times).
PREDICTED_ENTRIES, FILTER_RATIO = 2**17, 1e6
DENSE_DRAWS = 1000  # times at which draws of RBF are made by the root of their covariance: a second

# ---- state space, error of an approximate form
#: Times of the stretch that tells it; and noise in the rounding of K, of its diagonal.
ERROR_ROWS, LEAST_NOISE_SHARE = 256, 1e-14

# ---- state space, ascent of sites: labels, counts and Student-t noise at n = 100 to 1e5
SITES_TILE = 2**16  # rows whose expectations are taken together: temporaries of 0.5 MB
#: Nats an observation, gained by a step, at which caution about convex rows is given up.
SETTLED = 1e-2
SETTLED_MIX = 0.1  # of the tolerance: what a step may promise where mixed ones gain so little
SHORTEST = 2.0**-10  # step at which the search is given up
ROUNDING = 1e-12  # of the ELBO's terms, which cancel: what it may fall by
#: Of the precision of f that stays, at least, when a row is left out: sites may not have converged.
LEAST_SHARE = 0.01

# ---- state space, states at knots
#: Knots a length scale that leave nearly nothing to be gained by more (ELBO of drawn series).
PER_SCALE = 10
MAX_KNOTS = 1000  # inducing states by default
PAIRS = 2**14  # pairs of times that are worked on together
ENTRIES = 2**18  # entries of the largest temporary of a tile of rows: 2 MB
CROWDED = 64  # times in an interval beyond which joint draws divide it

# ---- state space, sites of rows that come later, which are never looked at again
#: Passes of the search, and its least gain in nats per observation.
ADDED_ITER, ADDED_TOL = 50, 1e-10

# ---- state space, additive models
FEWEST_BINS = 16  # bins that a column keeps where all columns together would have too many
BIN_MATRICES = 8  # matrices (M, M) of all bins that are held at once
CELLS = 2**16  # cells of cross tables that are counted at once: they stay in the cache
#: Precision of a site in units of the prior's, beyond which I + W^1/2 K W^1/2 has fewer than four
#: digits of a singular K left.
SHARP_SITE = 1e12
#: Of a batch of predictions: numbers of the covariances with training rows or of a table of the
#: states at the bins of two columns, and bytes of what the rows have of all columns.
BATCH_NUMBERS, BATCH_BYTES = 2**22, 2**29

# ---- natural-gradient steps (natural.py, sparse.py)
SITE_STEP = 0.8  # of whitened q; prototypes converged in 6 to 14 steps with .7 to .8
SITE_CUT, SHORTEST_SITE_STEP = 0.25, 1e-8  # of a step that lowers the ELBO; where to give up
ROUNDING_OF_ELBO = 1e-9  # share of the ELBO that rounding may cost a step
LEAST_SITE_BETA = 1e-3  # stands for a smaller beta, with which the sites would be all that counts
HASTE = 5.0  # times the residual asked for will do while the ELBO rises fast

# ---- GPs from nearest neighbours: the model (neighbors/)
# Noise of u beside f, relative to the variance at each inducing point. Part of the model: bounds
# the condition number of H points by H / 1e-4, which float32 can factor.
LOCAL_JITTER = 1e-4
# Where one factor, in float64, serves all rows: with a point a row, u is f and this noise besides
# that of the observations, and next to little noise 1e-8 is not nothing.
SHARED_JITTER = 1e-12

# ---- which points a prediction uses
# tau. Of kin40k (8 columns; 3000 training rows, 1000 others) the negative log-density of rows left
# out is 0.150 with and without the fading, 0.159 with a tau of 0.01, 0.197 if all neighbours fade.
FADING = 1e-3
# Global points: a sine seen but for a gap of two radians, noise of a tenth, has means that change
# by 20 and more an input unit without them, by 3 with them.
N_GLOBAL = 16
# They join where they explain so much of the prior's variance, in the mean, at some points.
EXPLAINED, N_COMPARED = 0.5, 1000
# Ratio of scales: of 105 569 satellite temperatures (Matern 1/2), discs of 2% of the training rows
# left out have a negative log-density of .737 given their 64 nearest, .663 given 32 nearest and 16
# each of every 16th and every 256th row; rows left out at random do not tell them apart.
COARSER = 16

# ---- rows in batches (neighbors/system.py)
NOVEL = 1e-3  # unexplained part of the prior variance below which a row adds no inducing point
SEPARABLE = 1e-8  # noise, of the prior variance, that leaves digits to a difference of inverses

# ---- the search of neighbours (neighbors/search.py, metrics.py, posterior.py)
# Columns up to which a tree is faster than all distances (0.5 s against 10.8 s at d = 8); where
# some hundred queries must repay its growing.
TREE_COLUMNS, TREE_COLUMNS_FAST = 10, 4
# Columns and points from which principal components repay their computation (MNIST: 8 s and 66 s),
# rows that they are of, and the variance they must hold (99.6% of 32 neighbours found).
MANY_COLUMNS, MANY_POINTS, PCA_ROWS, HELD_VARIANCE = 50, 4096, 20_000, 0.9
CORRELATION_STEP = 2.0**-36  # correlations that differ by less count as equal
BEYOND = 1e100  # scaled coordinates are cut here, so that their squares are finite
BEYOND_TREND = 1e30  # scaled times of a trend: its variance is of the fourth power
SPREAD_ROWS = 10_000  # whose standard deviations stand for those of all
GROUP = 16  # groups whose minima tell where the smallest values are, at a third of the cost
DIRECT_COLUMNS = 10  # up to which differences are as fast as a matrix product

# ---- tiles of neighbours: numbers in the largest temporary
# Of conditionals: 2 MB in float64. At H = 64, 2048 rows at once take twice the time a row of 64 at
# once, for want of cache.
CACHED_NUMBERS = 2**18
NEIGHBOR_TILE, SEARCH_CACHED = 2**22, 2**16
UNION_POINTS = 2048  # whose covariances with a union are in memory at once
# Entries of local inverses held while Q is assembled, and what each takes with its index.
ASSEMBLED, ENTRY_BYTES = 2**25, 32
# Inducing points up to which Q is added up in a dense table, 32 MB: 65536 rows with 16 neighbours
# among 1000 points take 0.3 s in place of 1.3.
TABLE_POINTS = 2048
DENSE_SYSTEM = 3  # matrices (n, M) and (M, M) of the system of a full covariance
# Bytes of an entry of a sparse matrix; inducing points at which entries are counted beforehand.
SPARSE_ENTRY, COUNTED_POINTS = 12, 200
HELD_SUMS = 8  # sums that a pass over blocks of rows holds at once: a tree over 2^8 blocks
FIRST_PASSES = 2  # passes over blocks of the first step: at the start, and at what it goes to

# ---- mixtures of exact GPs (mixture.py): none moves a prediction by more than the tolerances
FACTOR_BYTES = 1e9  # kept for later predictions, at most
MIXTURE_TILE_BYTES = 2**22  # of one of the few (n, t) matrices that a tile needs: in the cache
FEW_MIXED_ROWS = 200  # training rows up to which all samples are evaluated at once
TOGETHER = 2**19  # covariances of all samples with new rows, up to which they are made at once
MOST_JOINT = 4000  # rows up to which a joint draw factors their covariance
# Of the draws from the prior beyond, and frequencies at once.
MIXTURE_FEATURES, MIXTURE_BLOCK = 8000, 250
PIVOT_SEED = 0  # of the pivots, which touch the speed alone
# Of the low rank of a stochastic gradient's preconditioner (a quarter of the budget is for one):
# twice these beside each other. Of the tile of a solution (an eighth of it): a third of the ten.
LOW_RANK_COPIES, SOLVED_COPIES = 3.0, 4.0
# (n, t) matrices of the joint covariance of t new rows; of "vecchia" (t, t) matrices.
JOINT_COPIES = {"cg": 10, "cholesky": 3, "vecchia": 8}
# Of kernel matrices that are not stored: fewest products of a solution, and kernel values made anew
# for the variances of a call, at 4 ns of one core each: an hour.
FEWEST_PRODUCTS, MADE_ANEW = 30, 1e12
SOLVED = {torch.float32: 1e-5, torch.float64: 1e-8}  # relative residual that products attain
VARIANCE_TOL = 0.01  # of the noise variance: the most that a variance may exceed the exact one
MIXTURE_JITTER = {torch.float32: 1e-5, torch.float64: 1e-8}  # of K_mm, of its mean diagonal
MAX_STEPS = 100  # of Newton's method for quantiles, which takes five to ten
ELEMENTS = 2**20  # component values of quantiles held at once

# ---- exact processes given their matrices (exact.py)
#: Entries of a covariance up to which NumPy takes less time than torch (150 rows).
DENSE_ENTRIES = 2**14 + 2**13

# ---- terms of a series
# Variance of a categorical or smooth term of a standardised target to start with, and bounds.
TERM_VARIANCE, TERM_VARIANCES = 0.1, (1e-8, 1e3)
# Functions of a smooth term, and the half length of their interval in half ranges of the column:
# with 16 and 1.5, good from 0.17 half ranges on (Riutort-Mayol et al. 2023, eq. 18).
SMOOTH_FUNCTIONS, SMOOTH_INTERVAL = 16, 1.5
SMOOTH_SCALES = (0.17, 0.5, 3.0)  # length scale, in half ranges: least, at the start, and greatest

# Observations up to which a filter goes on one by one, and the state before is not run through
# again: 30 us each, where a run takes 20 ms and some 2 us a point.
FILTERED_ROWS = 1000

# ---- Vecchia approximations
FIRST_BLOCK = 256  # points of the first prefix in which neighbours are searched
# Nearest points asked for, of those expected to hold as many earlier ones as are wanted; twice as
# many where they do not. Of 1, 1.15, 1.3 and 1.6, 100,000 points of 2 columns take 2.8, 2.7, 2.9
# and 3.4 s, log-normal ones 4.5, 4.0, 3.9 and 4.0, of 8 columns 15.6, 17.4, 14.8 and 20.1.
EARLIER_SHARE = 1.2
# Nearest points, of a neighbour, among which conditional variances choose. Of 2, 3, 5 and 10 the
# divergence (1500 points, H = 20) is 1.0, 1.2, 1.2, 1.2 in 2 columns, 160, 136, 119, 112 in 8.
EARLIER_CANDIDATES = 3
# Columns beyond which the covariances of all candidates, by one matrix product, cost less than
# those with the pivots by differences. Of 3000 rows, 16 columns, RBF .44 -> .33 s, Matern .42 ->
# .42; of 32 .62 -> .39 and .74 -> .51, of 784 45 -> 7 s; all neighbours are the same.
PRODUCT_COLUMNS = 20
# Of a nearly maximin order: points near another, of a mean row, and neighbours looked at. KL
# divergences (2000 points, 2 and 8 columns) within 10% of those of maximin, at 1 to 5% more than 2.
THIN_DEGREE, THIN_NEIGHBORS = 2, 6
# Of the mean share of variance that an observation takes, what those take that others are to join
# as neighbours. Of 1200 rows 100 or 400 had full weight and the others 1e-12 to 1e-4 of it: errors
# 1.0 and 1.25 times those of the dense GP, 2.6 and 1.8 without. 0.1 leaves 100 and 1e-4 as it was.
LEAST_INFORMATION = 0.5
# Latent values: jitter, a variance in squared units of the link; points up to which factors
# are dense, and exact; draws of the posterior of more; conjugate gradients at most; residuals
# of probes and of draws, relative. Draws to 1e-3 in place of 1e-2 take a third longer and change
# the mean log-variance by .004, of which the error of one is .1 to .2 (4000 rows of kin40k above
# the median, 15000 flights).
LATENT_JITTER = 1e-6
LATENT_DENSE = 500
LATENT_DRAWS = 50
# Cubes of the sides of dense factors, of all columns together, up to which predictions take these
# in place of draws, of which the variance has a relative error of a fifth: 1750 points with 400
# inducing points take a second.
LATENT_CUBES = 1e10
LATENT_CG = 500
PROBE_TOL, DRAW_TOL = 1e-3, 1e-2
# Numbers of the right-hand sides of draws at once, and of all draws, of which there are at least so
# many: 25 in place of 50 change the log-loss of 15000 flights and 4000 rows of kin40k by 1e-4.
# Trials of kernels take no more.
DRAW_NUMBERS, MOST_DRAWN, LEAST_DRAWS = 2**21, 5_000_000, 20
# Newton's method for the mode: relative gradient, and steps at most.
LATENT_TOL, LATENT_STEPS = 1e-8, 50
# Relative residual of its first step from a mode nearby. Of 9400 labels of kin40k, at 2.2 times the
# amplitude and 1.5 the lengths, it and 4 more take the place of 20 from whitened coordinates.
START_TOL = 1e-2
# Of the prior variance at a point, what rounding leaves uncertain of a residual beside inducing
# points, in units of eps: without it the factors of DotProduct() + RBF() on columns of 1e9 fail
# (tests/estimators/test_vecchia_classifier.py).
RESIDUAL_ROUNDING = 100
