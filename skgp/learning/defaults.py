"""Constants of the searches for hyper-parameters and of choices, each with what chose it."""

from typing import Any

# ---- Choices by held-out data (selection.py)

#: Nats an observation below which a gain is none: .3% of the loss of a fair coin, .69.
LEAST_EFFECT = 2e-3
#: Share of the loss of labels below which a gain is none.
LABEL_SHARE = 0.02

# ---- Evidence of few observations (kernel_choice.py, kernel_family.py)

#: Columns of the group of relevant ones, at most.
MOST_GROUPED = 32
#: Log length scales to begin with of k relevant columns, relative to those of all: the root of k
#: and a bit more; and of the others, at which the kernel is nearly flat.
SHORT, LONG = 0.3, 2.0
#: Starts of columns that oscillate: factors by which their length scale is shorter than the shared
#: one, and standard errors by which the autocorrelation of residuals along them is above zero
#: (``bench_noise_free.py::test_oscillations``).
OSCILLATION_FACTORS, AUTOCORRELATED = (8.0, 16.0, 32.0, 64.0, 128.0), 4.0
#: Starts of a family beside another's optimum: factors by which its length scales are shorter. Of
#: smoother kernels they are a tenth: from the others' the evidence ends at noise alone.
SMOOTHER_FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0)
#: Relative tolerance of the evidence of one kernel without priors.
EVIDENCE_TOL = 1e-6
#: Of the differences of theta that make the Hessian of the objective.
DIFFERENCE = 1e-3
#: Least curvature of the objective, in nats: that of its priors, about.
LEAST_CURVATURE = 0.1
#: Evaluations on all rows that the curvature on 500 saves: of 1000 to 1500 rows of eight sets and
#: friedman1, searches of 7 to 38 evaluations take 3 to 13 to the same optima; those of sml, and of
#: naval where the noise is at its bound, are no shorter.
EVALUATIONS_SAVED = 20
#: Move of an element of theta that its linearisation is trusted with.
FARTHEST = 1.0

# ---- Searches by neighbours (search.py, classification_hyperparameters.py)

#: Variances of the noise to begin with, relative to that of standardised targets.
NOISE_GRID = (1e-3, 1e-2, 1e-1, 0.5)
#: Rows of a series, at most twice as many, on which other starts of a search are looked at: 24
#: evaluations of a dense evidence, .05 s.
SERIES_START_ROWS = 200
#: Rows of labels or counts on which they are looked at.
LATENT_START_ROWS = 300
#: Of numbers that stand for f (latent_numbers.py): noise to begin with and its bounds, relative to
#: their variance; and, of their precisions, how near the prior mean they are taken. Of 0 to 16, at
#: mean counts of .3, 1 and 3, 16 cost at most .004 nats an observation against equal precisions,
#: 1 up to .02; from 100 on none differs.
NUMBERS_NOISE, NUMBERS_NOISE_BOUNDS, NUMBERS_SHRUNK = 0.1, (1e-8, 1e1), 16.0
# Numbers of the covariances of observations that are scored together: 32 MB each.
SCORED_NUMBERS = 2**22
#: Noise variance of labels taken for numbers, relative to that of the signal: start and bounds.
LABEL_NOISE, LABEL_NOISE_BOUNDS = 0.2, (1e-4, 1e1)

# ---- Newton's method for the mode (laplace_evidence.py)

MAX_NEWTON, MAX_HALVINGS = 100, 30
#: A step of squared length 1e-10 (in the metric of the Hessian) leaves about 1e-10 of error.
LAST_STEP = 1e-10

# ---- direct loss minimisation (models/dlm.py, sparse/, estimators/_dlm*.py)
# Numbers are entries of an n x M matrix; "rows" a column of them.
LEAST_BETA = 1e-8  # stands for a smaller beta where q(u) would have no variance, or no ridge
BLOCK_NUMBERS = 1e7  # held at once when the objective of all rows is evaluated: 80 MB
# From these on minibatches take over: in a joint search, and in one of q(u) alone, whose iterations
# are cheaper and fewer. Kin40k, n = 2000 to 10000, M = 200.
JOINT_NUMBERS, ALONE_NUMBERS = 1e6, 1e7
STEPS_PER_ITERATION = 2  # of minibatches
ALONE_SHARE = 0.15  # of the iterations, for q(u) alone before and after a joint search
MAX_HELD_OUT = 4000
SCORE_EVERY, SCORE_PATIENCE = 5, 6  # iterations between two scores; scores without a new best
SHORT_ROUNDS, SHORT_ROUND = 3, 15  # of L-BFGS, for inducing points (kin40k)
# Start by the ELBO. Kin40k, M = 500: 15 iterations of the collapsed ELBO on 20 M rows gained more
# than 200 steps of Adam, in half the time.
START_NUMBERS = 8e5
START_PER_INDUCING, MORE_PER_INDUCING = 8, 20  # rows, at least: of the start, and of its end
# That choose among families of kernels; more points would not rank them otherwise.
FAMILY_ROWS, FAMILY_POINTS, FAMILY_ITER = 1000, 200, 30
SCREEN_ROWS = 100  # on which kernels are compared by the evidence of few rows
FEW_STEPS = 3  # of natural gradients with few rows
# Grids of the posterior's width and of the noise, from the ELBO's to the log-loss's.
WIDTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
LESS_NOISE = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)
GRID_ROWS = 4000
# More inducing points: rows to learn q from and to judge it by; nats an observation that pay.
MAX_SIZE_ROWS, POINTS_WORTH = 20_000, 0.02
# Means after minibatches, both from the simplest: ridges in units of the one that the ELBO prefers,
# and shares of least squares.
BLEND_RIDGES = (1.0, 0.3, 0.1, 0.03)
BLEND_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Minibatches of Adam. The rate is that of hyper-parameters, which are logarithms; shares of it are
# in standard deviations of the starting posterior (alpha), length scales (Z), relative changes.
LEARNING_RATE = 0.03
RATE_SHARES = {"alpha": 5.0, "triangle": 2.0, "theta": 1.0, "likelihood": 1.0, "Z": 1 / 3}
ADAM_MOMENTS = (0.9, 0.99)  # of sparse-within-sparse GPs, too
LEAST_BATCH, BATCH_PER_INDUCING = 1000, 4  # rows; with fewer, O(M^3) outweighs the rows' part
SPARSE_PATIENCE, SPARSE_SMOOTHING = 30, 0.9
WATCH_EVERY = 4  # steps, which are shorter and noisier than the iterations of a full search
# Weights of the divergence that beta="auto" may try: smooth curves on kin40k, ringnorm and counts.
BETAS = (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.06, 0.03, 0.015)
BETA_STEPS = 5  # a warm fit of the path has a fifth of the iterations of a single one
MAX_RISES = 2  # of the loss in a row, which end a way
FEWEST_FOR_BETA = 30  # observations: fewer cannot be split by their purposes, and beta stays 1
MOST_HELD_OUT = 0.2  # of the rows, for each purpose
# Weight of the old posterior under the log-loss of numbers: on rows of Gaussian and Student-t noise
# and on counts it came nearer to all rows at once than 1 did.
LOG_LOSS_WEIGHT = 10.0
# Matrices that a sparse fit holds at once: (M, M), besides two of each latent function; (n, M) of
# FITC.
SPARSE_MATRICES, FITC_MATRICES = 6, 6
# Choices of the estimators. Rows below which too few could be held out to say when to stop a joint
# search, or to couple classes; entries of the c matrices n x M that are made of those left out.
FEW_ROWS, LEFT_OUT_NUMBERS = 100, 1e7
# Of n_inducing="auto": distinct inputs up to which a process of Gaussian noise is exact (concrete,
# airfoil: NLPD .09, .18 below that of 200 points, in the same time); points to begin with beyond,
# and for what has no closed form; and what a gain on held-out data may raise them to.
EXACT_ROWS, AUTO_INDUCING, AUTO_SIZES = 3000, 200, (400, 800)
# Rows an inducing point up to which the process is nearly exact: a joint search only overfits.
FEW_PER_INDUCING = 2
# Rows up to which a dense process may be searched for hyper-parameters. Falls of the objective that
# end a search are `tol` for this many observations, of fewer as much greater: what is less than a
# tenth of a nat of all rows is noise.
DENSE_ROWS, TOL_ROWS = 500, 1e5
# Of the log ratios of length scales, a priori, in a dense search of the default kernels: less hurts
# where a column matters most, none overfits with many columns; counts, which tell more, do without.
RATIO_STD = 0.7
NOISE_FLOOR = 1e-4  # of the variance of y: joint log-loss would drive the noise to nothing

# ---- sparse-within-sparse GPs: Algorithm 1 (local/minibatch.py, bound.py; models/swsgp.py)
#: Rates of each kind of coordinate, as multiples of LEARNING_RATE.
LOCAL_RATE_SHARES = {"mean": 10.0, "spread": 10.0, "theta": 1.0, "likelihood": 1.0, "Z": 0.5}
#: Fraction of the steps, the last ones, in which the rate falls.
FALLING = 0.5
#: Steps between two searches for active points, where the kernel or Z moves, and two reports.
REFRESH_EVERY, REPORT_EVERY = 50, 10
#: Of the search for a plateau: steps compared, and nats an observation that count as nothing.
PLATEAU_WINDOW, PLATEAU_GAIN = 100, 2e-3
#: Steps of Algorithm 1 at most, and of a polish.
MOST_ITER, POLISH_ITER = 6000, 400
#: Numbers in the largest array of a tile of rows of the bound.
BOUND_NUMBERS = 2**22

# ---- closed form and natural-gradient steps (models/swsgp.py)
NATURAL_ITER = 14
#: Share of the precisions of the sites that another step would change, beyond which the steps ended
#: short: converged fits are below .02, counts after one step below .1, labels after three at .2, a
#: fit that the precisions of E[exp f] hold about 1 (tests/estimators/test_large_counts.py).
UNSETTLED = 0.5
#: Turns of q and the likelihood's parameters, and steps of L-BFGS in each.
LIKELIHOOD_ROUNDS, LIKELIHOOD_ITER = 3, 20
#: Residuals of the means: small where there is one system to solve or little to each of them, so
#: that the order of rows, or the units of y, do not show in the predictions. Where there is one of
#: many after another, 3e-3 takes half the iterations of 1e-3 and changes the bound by less than the
#: tolerance of the steps (60000 flights, M = 24000: by 1e-4 of it).
SMALL = 5000
TIGHT_CG: dict[str, Any] = {"cg_tol": 1e-8, "cg_max_iter": 1000}
CLOSED_CG: dict[str, Any] = {"cg_tol": 1e-3, "cg_max_iter": 200}
STEPS_CG: dict[str, Any] = {"cg_tol": 3e-3, "cg_max_iter": 200}

# ---- rows held out (local/prior.py)
#: Rows held out, at least; none below FEW_ROWS.
MIN_HELD_OUT = 500
#: Factors by which the amplitude and the KL weight move, and so many steps either way.
AMPLITUDE_STEP, KL_STEP, MOST_STEPS = 3.0, 0.1, 5
#: Fits of a trial: steps without and with a warm start, tolerance of the bound, and systems.
FIRST_TRIAL_ITER, TRIAL_ITER = 16, 10
TRIAL: dict[str, Any] = {"tol": 1e-3, "cg_max_iter": 15, "cg_tol": 3e-3}
#: Standard errors by which kappa must improve predictions: a rare class has few rows held out.
KL_ERRORS = 2.0

# ---- labels (local/hyperparameters.py)
#: Labels that are left out to fit the link, and to choose the noise.
LINK_ROWS, NOISE_ROWS = 10_000, 2_000
#: Standard deviation of the priors of t and the logs of a, b and d.
LINK_PRIOR_STD = 3.0
#: Noise tried, of the kernel's variance, and where to begin.
NOISE_RATIOS, NOISE_START = (3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0), 0.1
#: Leave-one-out searches of a kernel for labels: the first of each family, and that of the best.
SHORT_SEARCH: dict[str, Any] = {
    "n_neighbors": 20,
    "batch_size": 192,
    "n_steps": 70,
    "learning_rate": 0.3,
}
LONG_SEARCH: dict[str, Any] = {
    "n_neighbors": 32,
    "batch_size": 192,
    "n_steps": 130,
    "learning_rate": 0.2,
}
#: Rows that the evidence of a dense GP knows well enough.
SEARCHED_ROWS = 2_000
#: Noise of standardised labels to begin with.
KRIGED_LABEL_NOISE = 0.1
#: Neighbours of a comparison at most, which takes the cube of it; errors by which to win it.
COMPARED_NEIGHBORS, KRIGED_ERRORS = 32, 2.0

SEARCH: dict[str, Any] = {"subset_size": 700, "n_neighbors": 32, "n_score_rows": 1024}
#: Of the families that are searched by neighbours: neighbours hide what lies between.
FAMILY_STRIDE = 2

# ---- QSGP: plans (design experiments on kin40k, protein, pol, keggdirected and MNIST) -----------

FACTOR_ROWS = 4_000
"""Observations of an exact GP whose factor is kept."""

CHOLESKY_ROWS = 16_000
"""Observations of an exact GP, its factor dropped after the solve."""

CHOLESKY_FEATURES = 8_192
"""Features of a streaming Gram matrix of m x m float64: 0.5 GB, 44 s on kin40k."""

GRAM_FLOPS = 8e12
"""Of a Gram matrix of features, n m^2: about a minute on two cores."""

STREAMING_FEATURES = 1_024
"""Features of partial_fit, whose first call cannot know how many rows will come."""

STOCHASTIC_FEATURES = 100_000
"""The paper's m."""

N_NEIGHBORS = 128
"""Neighbours of local regression."""

N_SCALES = 3
"""Scales that they come from: all rows, one in 16, one in 256."""

GLOBAL_SEARCH: dict[str, Any] = {"n_scales": N_SCALES, "n_compared": 192, "n_score_rows": 512}
"""Search for hyper-parameters where all observations predict. Given the nearest alone, long length
scales cannot be told from short ones: those of a sine plus a product (bench_front_door.py, n =
6000) went from 2.6 to 5.1, and the exact GP's log density of held-out data from .89 to .70 nats.
With three scales .89; the cost is .016 of .71 on kin40k, .005 of 1.07 on pol. What is found is
compared with its start by more neighbours."""

PRECONDITIONER_RANK = 4_000
"""Of conjugate gradients where the matrix is ill conditioned; three eighths of it elsewhere
(kin40k: 1500)."""

ILL_CONDITIONED = 1e7
"""trace(K) / noise, a bound on the condition number of K + noise I."""

FALL_BACK_RESIDUAL = 0.1
"""Relative residual of the mean above which a solution by conjugate gradients is not used."""

FALL_BACK_POINTS = 2_000
"""Inducing points that replace it, or that stand for summands without a spectral density."""

GRAM_MATRICES, DENSE_MATRICES, HESSIANS = 5, 3, 3
"""Square float64 matrices held at once by a solution with a Gram matrix, by one with the kernel
matrix, and by Newton's method beside the covariances that it ends with."""

LOW_RANK = 1_000
"""Largest numerical rank at which K is treated as of that rank (keggdirected: 240)."""

LOW_RANK_RESIDUAL = 1e-2
"""Mean residual variance, relative to the noise, at which a rank is looked at."""

LARGEST_LEFT = 0.1
"""Largest eigenvalue of what a low rank leaves of K, relative to the noise: observations would move
a function along it by a tenth of what they say. On 10000 rows of a product of two of four columns
the mean alone left eigenvalues of some 40 times the noise and an error of .17, with noise of .1."""

LEFT_ROWS = 1_000
"""Observations among which that eigenvalue is estimated."""

PROBED_ROWS = 5_000
"""Observations whose rank is looked at before that of all."""

LAPLACE_ROWS = 3_000
"""Observations up to which Laplace noise has a basis function for each."""

LAPLACE_FLOPS = 3e11
"""n m^2 beyond them: about twelve passes over the data, some two minutes on two cores."""

SINGLE_SIZE = {"laplace": 10_000_000, "newton": 20_000_000}
"""Numbers of features beyond which they are in float32, where that costs no accuracy."""

PROBE_ROWS = {"laplace": 64, "newton": 32}
"""Observations by which float32 is judged."""

SUBSET_ROWS = 1_000
"""Observations that the search for a classifier's hyper-parameters sees; of no more, the amplitude
is known."""

FULL_ROWS = 2_000
"""Observations of a classifier with one basis function each."""

MOST_FEATURES = 4_096
"""Of a classifier (MNIST: 98.62% in 36 s; 8192 98.80% in 125 s)."""

NEWTON_FLOPS = 1.2e12
"""n m^2 of a classifier: about a minute of Newton steps."""

SUMS_PASSES = 12
"""Of a classifier in blocks: times n m^2 that its steps take for each column, in exact Hessians."""

FULL_COVARIANCE_NUMBERS = 4_000_000
"""float32 roots kept in a fitted classifier."""

# ---- QSGP: routes compared on held-out data where the kernel matrix is too large ----------------

DISCS, DISC_SHARE, DISC_ROWS = 8, 0.01, 5_000
"""Discs held out, a hundredth of the observations each, at most so many."""

SCORED = 256
"""Observations scored of either kind."""

TRIAL_ROWS, TRIAL_FEATURES = 20_000, (512, 1_024)
"""Observations and sizes at which weight space is tried."""

EXACT_NEIGHBORS, EXACT_SCORED = 512, 64
"""What stands for the exact GP."""

LEAST_GAIN = 0.02
"""Nats an observation by which a dearer route must be better."""

CG_ITERATIONS, ENTRY_FLOPS = 60, 40
"""Of conjugate gradients; to compute an entry of K anew."""

CG_FLOPS = {"cpu": 1e13, "cuda": 3e16}
"""About ten minutes of two cores, or of an accelerator."""

# ---- QSGP: amplitude, length scales and moderation of classifiers -------------------------------

AMPLITUDES = (0.25, 1.0, 4.0, 16.0, 64.0)
"""Amplitudes tried, as multiples of the one learned on the subset."""

AMPLITUDE_COLUMNS = 3
"""Columns of a problem of many classes that take part in the choice of the amplitude."""

LEAVE_ONE_OUT_FLOPS = 3e10
"""Cost of an approximate leave-one-out score up to which it takes the place of held-out data."""

AMPLITUDE_HELD_OUT = 5_000
"""Observations held out, at most; as a share of all, a tenth."""

SCALE_ROWS = 5_000
"""Fewer observations hold no more than the search for hyper-parameters has seen."""

SCALE_TRAINING, SCALE_HELD_OUT, SCALE_POINTS = 12_000, 4_000, 1_200
"""Of a trial of length scales."""

SCALE_STEP, SCALE_MAX_STEPS = 2**0.5, 4
"""Factor of the length scales, and how often it is taken in one direction."""

SCALE_AMPLITUDES = (1.0, 4.0, 16.0)
"""Amplitudes fitted together in each trial."""

MODERATIONS = (0.0, 1 / 16, 1 / 4, 1.0)
"""Factors of the latent variance to choose among. In eighteen problems (59 to 900 observations of
nine data sets trained on, others judged by) the loss of 1/16 exceeded the least of these and 1/64
by .010 nats an observation on average, that of 0 by .012, of 1/4 by .040, of 1 by .14."""

FEW_ROWS_MODERATION = 1 / 16
"""Where no observation can be left out that the hyper-parameters have not seen."""

COUPLINGS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Exponents of the coupling of classes to choose among."""

FEW_ROWS_COUPLING = 0.5
"""Where observations are too few to choose by."""

LEAST_PRECISION = 0.01
"""What stays of the precision of phi'u in a leave-one-out moment: all could go where a fit stopped
early."""

COUPLING_BETA = 1e-3
"""Below it the divergence holds nothing, and an observation left out would be all there was."""

# ---- QSGP: stochastic gradients, relevance vectors ----------------------------------------------

DIVERGED = 1.5
"""Times the mean square of the targets, left on the support rows."""

MAX_RESTARTS = 3
"""With a learning rate a tenth of the last one's."""

CALIBRATION_ROWS = 300
"""Observations held out of ten times as many or more to scale the variances of a regression, to
within a tenth. `examples/papers/qsgp_curves.py` prints the densities without: tens of nats more."""

MODERATION_ROWS = 300
"""Observations held out to decide about moderation; more would take long to predict with 1e6
functions."""

RELEVANCE_ROWS = 500
"""Observations whose marginal likelihood gives relevance vectors their first kernel."""

RELEVANCE_SEARCH = 2_000
"""Observations whose evidence decides about shorter length scales."""

RELEVANCE_TOL = 1e-3
"""Nats by which the evidence of a halving may fall."""

RELEVANCE_HALVINGS, RELEVANCE_WORTH = 6, 10.0
"""Halvings of the length scales, and the nats that one must gain: shorter ones take more
vectors."""

RELEVANCE_DOUBLINGS = 12
"""Of the length scales, where half of the observations are vectors: of targets without a signal
all are, at a noise of nothing (tests/estimators/test_qsgp_relevance.py)."""

# ---- Gross errors among the targets -------------------------------------------------------------

OUTLIER_CUTOFF = 5.0
"""Robust standard deviations beyond which an observation is an outlier."""

OUTLIER_QUANTILE, OUTLIER_QUANTILE_OF_NORMAL = 0.85, 1.4395
"""Of absolute residuals, and of |z|, z ~ N(0, 1): out of reach of up to 15% of wrong targets. The
median takes the hard rows of a function with plateaus for errors: 20% of the clean rows of pol, of
which the 85% quantile condemns 2%."""

MEDIAN_NEIGHBORS, PREDICTING_NEIGHBORS = 11, 24
"""Neighbours whose median judges an observation; that predict it."""

OUTLIER_ROUNDS, OUTLIER_CHANGED = 2, 0.01
"""Searches, and the share of observations judged otherwise that is not worth another."""

OUTLIER_BATCH = 256
"""Observations whose neighbours are gathered at once."""

# ---- State space (markov/, models/state_space.py)

#: Nats an observation to which the ELBO of a series, or of an additive model, is found.
ELBO_TOL, ADDITIVE_TOL = 1e-8, 1e-6
#: Tolerance of an ELBO, of that of the search that asks for it.
INNER = 0.1
#: Between inducing locations that are learned, of their span.
LEAST_GAP = 1e-6

#: Error of the evidence, in nats, from which on a state-space form is refined, and tolerances to
#: choose from: RBF of 10 to 16 states. Drawn series of noise 1e-2 to 1e-8 were within .01.
FORM_NATS, FORM_TOLERANCES = 0.003, (1e-8, 1e-9, 2e-11, 1e-12)
#: Error of the evidence, in nats, that is worth a warning.
WORTH_A_WARNING = 0.01

# Seasons and trends of a default kernel, which rows to come decide about: `bench_forecast.py`
#: Times from which on periods are looked for, cycles that must be seen, periods and harmonics that
#: are modelled at most.
SEASON_LEAST_ROWS, LEAST_CYCLES, MAX_SEASONS, MAX_SEASON_HARMONICS = 40, 2.95, 2, 6
#: Cycles that stiff backgrounds follow by half: waves of 3 to 8 cycles of 60 and 150 times, in
#: noise or beside walks and autoregressions, gain 16 to 52 nats over the better one on average;
#: those of walks alone 8 at most.
STIFF_CYCLES = 3.0, 12.0
#: Cycles of a season that may differ over another, as days do over the week.
MAX_WITHIN = 7
#: Chance that noise shows a period, or that it shows another harmonic of one found; part of the
#: variance that a period must explain. The first is small for what fitting the background adds: of
#: 300 series of 60 times without a season (walks, Matern 3/2, first-order autoregressions) 2 are
#: fitted with one, and 7 with 1e-3.
PEAK_CHANCE, PART_CHANCE, LEAST_EXPLAINED = 1e-4, 1e-3, 0.02
#: Resolutions to either side that the background of a peak is the median of.
NEIGHBOURHOOD = 20
#: Nats that a peak over its neighbourhood must have more than one over a background fitted.
UNMODELLED = 6.9
#: Times, or cells of more, over which waves are fitted, and their entries at once; cells a cycle of
#: the quickest of those in cells.
WAVE_ROWS, WAVE_ENTRIES, CELLS_A_CYCLE = 2000, 2**20, 6
#: Of the resolution, within which a period is a whole number of others, or of steps.
SNAP_TO_PERIOD, SNAP_TO_STEP = 0.1, 0.05
#: Times up to which seasons and trends compete: a matter of seconds. Drawn series of 40-200 times
#: (smooth and rough processes, noise, walks, lines, kinked lines, trend and season; 80 each), a
#: third ahead: averages over trend and process have an NLPD of 1.21 and intervals of 95% that cover
#: .944, the likelier one alone 1.26 and .933. By kind .13 less to .02 more. A prior of 12 times the
#: variance of the slope, that of short series, loses .01 and follows walks less.
STRUCTURE_ROWS = 20_000
#: Rows a hyper-parameter up to which predictions of a default series average over these, and the
#: weight of a point that counts. Generated series, 40 each, rows between the others and a little
#: ahead: intervals of 95% cover .84 of 10 rows, .87-.89 with one covariate and .91 with three,
#: .90-.91 of 20 rows and .91-.93 of 38.
AVERAGED_ROWS, LEAST_WEIGHT = 5, 1e-3
#: Times from which on, up to those of trends, predictions average over a line beneath the process.
#: Sixteen kinds of generated series, 20 each, a third ahead of 12, 20 and 32 times (of 5 and 8):
#: intervals of 95% cover .60 to 1 in place of .3 to 1 where there is a slope, and the NLPD is .3
#: (.9) less on average and .3 more at worst, of waves of which less than three cycles are seen. A
#: trend that is chosen instead loses .9 there, and an average with a line of as wide a prior as
#: long series have .6.
LINE_LEAST_ROWS = 4

#: Minibatches: Adam's rate, at most, and the sum of the rates of all iterations; the least share of
#: a minibatch in the sites; when a smoothed loss no longer falls.
MINIBATCH_RATE, MINIBATCH_REACH = 0.05, 15.0
OLDEST = 0.03
MINIBATCH_PATIENCE, MINIBATCH_SMOOTHING = 100, 0.95

# The choice of a kernel: series drawn from kernels of nu 1/2 to infinity, new rows predicted
#: Rows on which the length scale is found, and on which kernels compete.
SERIES_SCALE_ROWS, CHOICE_ROWS = 2000, 20_000
#: Stretches of consecutive rows that these are in, if not spread evenly.
N_STRETCHES = 10
#: Iterations of a competitor, which ends with gains of so many nats in all, or of few rows with so
#: much an observation; and the tolerance where it starts.
CHOICE_ITER, CHOICE_NATS, CHOICE_TOL, START_TOL = 25, 0.01, 1e-5, 1e-3
#: What is added to Fisher's information of a short series, a standard deviation of 3 in logarithms;
#: times the last gains that a search may hope for (60 to 300 times: ends within .1 nats).
FISHER_RIDGE, OUTLOOK = 0.1, 6.0
#: Times the gain that a score test promises that a search with a part more may hope for, and length
#: scales that it looks at. Of 634 searches beside trends and seasons (ten kinds of series of 40 to
#: 250 times) 408 are left out by it, none of which would have been chosen, nor with 3.
SCORE_OUTLOOK, N_SCORED = 4.0, 7
#: That a kernel besides the first needs, of a curvature of at most 1: a choice by 60 numbers
#: predicts better than the first kernel, and one by 320 labels does not yet.
ROWS_A_PARAMETER = 25
#: Of a short gap: below, the rows look like white noise whatever the scale.
LEAST_SCALE = 0.1
#: Multiples of the length scale that a start tries.
SCALES = tuple(10.0**power for power in (0.75, 0.0, -0.75, -1.5, -2.25, -3.0))

# Additive models
#: Rows up to which exact inference in their own space is thought of: the time of an iteration in
#: bins, with columns of numbers.
FEW_ADDITIVE_ROWS = 3000
#: Beyond which log-odds and log-rates of standardised data do not lie.
FAR = 10.0
#: Of the prior of hyper-parameters of a default model, that of the log of length scales and noise,
#: and the noise that its search begins with, beside the median. Generated functions of 1 to 30 of
#: 10 to 120 columns and training parts of 16 data sets, 60 to 250 rows: mean NLPD .5 (2.3 without a
#: prior); wider is overconfident where columns are many, a search from the median ends at noise
#: alone where there is little.
PRIOR_LOG_SD, PRIOR_START_NOISE = 1.0, 0.1
#: Rows on which interactions that an additive model leaves out are looked for, entries of all pairs
#: of columns together, and the nats an observation of which it warns. Of sums, steps, lines and
#: noise in 3 and 8 columns (96 fits of 60 to 1000 rows) the most is 4.6 nats, .05 an observation of
#: 60 rows; products, sines of sums and sums with a product have 10 nats and more from 200 rows on,
#: .06 to 1.9 an observation. Of labels of some products no component is left to tell by.
INTERACTION_ROWS, INTERACTION_ENTRIES, LEAST_INTERACTION = 300, 3e7, 0.05
#: Of an observation that tells nothing, beside that of the prior: not 0, whose noise is infinite.
LEAST_INFORMATION = 1e-8

# ---- searches from many starts (multi_start.py)
#: scikit-learn's own of L-BFGS-B: relative fall of the loss, greatest projected gradient, steps.
EXACT_TOL, EXACT_GTOL, EXACT_ITERATIONS = 2.2e-9, 1e-5, 15_000
#: Nats that a batched search still expects to gain when it ends; the best of them goes on.
BATCH_TOL = 1e-6
#: Numbers of the matrices of a batch: 32 MB each, of which some ten are held.
BATCH_NUMBERS = 2**22

# ---- Vecchia approximations (on satellite_temps, blocks of training observations held out)
#: Observations of the dense evidence that a search starts from, and rows on which starts are
#: compared.
VECCHIA_START_ROWS = 500
#: Rows, and iterations, by which families of kernels are compared.
VECCHIA_FAMILY_ROWS, VECCHIA_FAMILY_ITER = 2_000, 15
#: Inducing points, if any, and observations among which they are chosen. Of a smooth function of
#: two columns, 11000 rows and noise of a tenth, none leave 3 times the error of f that 400 do; of
#: log-normal inputs the likelihood is greater without. Of 200 rows without noise all leave the
#: exact GP's error, a quarter of them 2 to 13 times it (rosenbrock, friedman of
#: bench_noise_free.py). Of labels 200 leave a mean log-loss of .171 on spambase and none .208, on
#: 10000 rows of kin40k above the median .203 and .235 (tests/benchmarks/bench_vecchia_classes.py).
VECCHIA_INDUCING, VECCHIA_GREEDY_ROWS = 400, 4_000
#: Entries of their features, at most, where they are the default: 400 points of 100,000 rows, 40 of
#: a million, .3 GB. Those of satellite_temps take 78 s beside the 11 of the search, on a busy core.
VECCHIA_FEATURES = 40_000_000
#: Gain, in nats an observation, below which none are taken: white noise gains .0005 by chance, the
#: functions above .01 to .07.
VECCHIA_GAIN = 1e-3
#: Change of a log hyper-parameter in a stage below which no other follows.
VECCHIA_MOVED = 0.05
#: Blocks that are held out to compare families, their share of the observations each, and
#: neighbours of the predictions. Of satellite_temps Matern 1/2 has .02 nats less likelihood an
#: observation than Matern 3/2, and 60% of its error across gaps.
VECCHIA_BLOCKS, VECCHIA_BLOCK_SHARE, VECCHIA_HELD_NEIGHBORS = 20, 5e-3, 20
#: Probes of a log-determinant, of all columns.
VECCHIA_PROBES = 20
#: Evaluations without a gain after which a search by Laplace's evidence ends: probes estimate it
#: and its gradient, which agree up to their errors, and line searches of 20 trials took half of the
#: evaluations of 2000 counts of 8 columns for nothing.
VECCHIA_TRIALS = 5
#: Relative fall of the loss at which the comparison of families by Laplace's evidence ends.
VECCHIA_FAMILY_TOL = 1e-4
#: Inducing points, where the noise is not Gaussian: of 2000 counts of 8 columns none leave a
#: negative log density of 1.861, 100 one of 1.838 and 400 one of 1.842, in five times the seconds;
#: of 2 columns all are the same (tests/benchmarks/bench_vecchia_likelihoods.py).
VECCHIA_LATENT_INDUCING = 100
#: Points left out in turn to choose how probabilities are moderated.
VECCHIA_LEFT_OUT = 2_000
