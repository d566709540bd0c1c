"""Constants of the estimators, each with its reason or the experiment that chose it."""

import numpy as np

# -- Memory and threads

#: Bytes that the hooks may take at once while predicting.
PREDICTION_MEMORY = 256 * 2**20
#: What gradients in X take, relative to a prediction: the graph keeps what the latter overwrites.
GRAPH_COPIES = 8
#: What a fit holds in memory of n rows of d columns, in copies of X and y: 1e6 rows of four columns
#: took 1238 MB (tests/benchmarks/bench_large_n.py).
ROW_COPIES = 32
#: Rows of a block, at most and at least: passes of 1e5 to 1e6 rows take the same time.
BLOCK_ROWS, LEAST_BLOCK_ROWS = 2**18, 2**10
#: Rows at random from which hyper-parameters are learned where rows come in blocks: those among
#: which `skgp.learning.search.SearchSettings` looks for neighbours; and fewer, down to the other,
#: where the budget has no room for them.
SUBSET_ROWS, LEAST_SUBSET_ROWS = 60_000, 5_000
#: Values that a likelihood averages over f at once; each takes up to about 2 kB.
LIKELIHOOD_ELEMENTS = 2**14
#: Latent values that a link averages over at once; each takes up to about 2 kB.
LINK_ELEMENTS = 2**16
#: Entries of a covariance matrix that are computed at once, small enough for the cache.
COVARIANCE_ELEMENTS = 2**16
#: Matrices of the size of a joint covariance that are held at once.
JOINT_MATRICES = 3
#: Rows from which ``n_jobs`` holds throughout. A fit of 80 rows in two threads took ten to fifty
#: times its seconds on two processors that other processes shared, in waits at barriers.
MANY_ROWS = 2000
#: Rows of a prediction up to which it leaves the pools of threads alone: limiting them takes as
#: long as one of the others (tests/benchmarks/bench_one_row.py).
FEW_PREDICTED = 8
#: Rows from which device="auto" takes a GPU: an evaluation of a dense model launches some hundred
#: kernels of 10 us each, 1 to 2 ms, in which a processor does the n^3 flops of 500 rows. And those
#: of a series in one column: none. Its fit is 3000 to 250,000 operations on tiles that stay in a
#: processor's cache, whose launches alone, at 10 us, take 1.2 to 4 times the seconds that one
#: thread takes for all (1000 to 1e6 rows, Matern and a sum of two). Counted; measured on no GPU.
LEAST_GPU_ROWS, LEAST_GPU_SERIES = 500, np.inf

#: Between two lines that ``verbose=1`` prints of one stage.
SECONDS_A_LINE = 10.0

# -- Range of floating point

#: Largest magnitude of an input, by the dtype of a fit: squares of distances stay finite.
LARGEST_INPUT = {"float64": 1e100, "float32": 1e15}
#: The same of a target: variances stay finite.
LARGEST_TARGET = 1e150
#: What stands for log(0), so that classes that are all impossible come out equal and not NaN.
LOG_ZERO = -1e300
#: Logarithm of the greatest moment of e^f; `Poisson` bounds its own alike.
MAX_EXPONENT = 0.9 * np.log(np.finfo(np.float64).max)
#: Base rates are kept this far from 0 and 1, where the link is infinite.
LEAST_BASE_RATE = 1e-6

# -- Averages of a link over f

#: Terms of the Hermite series of a link; its error is below 1e-8 while the latent std is below 3.
HERMITE_TERMS = 64
#: Range, in standard deviations of f, and step of the rule that computes its coefficients.
HERMITE_RANGE, HERMITE_STEP = 12.0, 0.1

# -- Likelihoods of regression

#: Mean of the weights, of their median, beyond which the noise of an observation of mean weight is
#: warned of: intervals of others are three times too narrow.
UNLIKE_WEIGHTS = 10.0

#: Degrees of freedom of Student-t noise: of moments that exist to nearly Gaussian.
DF_BOUNDS = (2.1, 200.0)
DF_START = 4.0
#: What one observation is worth against a mean count of 0.
LEAST_COUNT = 0.5

# -- Default kernels

#: Bounds of the variance of noise, of a target of unit variance. Targets without noise, as of
#: simulations, have greater errors where it is at least 1e-5
#: (tests/benchmarks/bench_noise_free.py::test_regressors, "QSGP, 1e-5").
NOISE_BOUNDS = (1e-8, 1e1)
#: Bounds of the variance of f, of a target of unit variance; where the rate of counts is about f
#: itself, up to the square of a large count, for 100 is no standard deviation of counts of 1e5
#: (tests/estimators/test_vecchia_likelihoods.py).
SIGNAL_BOUNDS, LARGE_COUNT = (1e-3, 1e4), 1e7
#: Rows of labels up to which kernels of unlike smoothness cannot be told apart.
FEW_LABELS = 200
#: Variance of a latent function: probabilities of about .1 to .9 to start with, as a multiple of
#: the variance of the link's distribution, logistic or normal.
LATENT_VARIANCE, LATENT_BOUNDS = {"logit": 4.0, "probit": 4.0 * 3 / np.pi**2}, (1e-3, 1e6)

# -- Inducing points and projections

#: Rows that the clustering looks at, as a multiple of the centres, over all minibatches, and these.
CLUSTER_PASSES, CLUSTER_BATCH = 2, 4_096
#: Rows among which points are chosen greedily.
GREEDY_ROWS = 20_000
#: Length scales beyond which all rows are equally far.
FARTHEST = 1e6
#: Columns beyond which a default kernel is one of principal components, and how many it takes; a
#: classifier then also tries one length scale for all.
MANY_COLUMNS = 50
#: Rows that are projected by one product.
PROJECTED_ROWS = 64
#: Rows of a covariance that are summed at once.
SCATTER_ROWS = 8_192
#: Whether to divide columns by their spreads: rows among which neighbours are looked for, of how
#: many rows, how many, and standard errors by which they must predict better then. Powers of the
#: columns are chosen likewise, and by the rows of LOG_ROWS (`tests.benchmarks.bench_choices`).
SPREAD_CANDIDATES, SPREAD_COMPARED, SPREAD_NEIGHBORS, SPREAD_ERRORS = 10_000, 2_000, 10, 2.0
#: Rows of a trial fit of a projection and rows held out for it, at most.
TRIAL_ROWS, TRIAL_JUDGED = 500, 1_000

# -- Sparse within sparse

#: Inducing points by default: one a row, up to so many.
SWSGP_MAX_INDUCING = 100_000
#: The same of rows in blocks, whose sums for 10000 points and 32 neighbours take .3 GB (257 pairs a
#: point in four columns).
SWSGP_BLOCKS_INDUCING = 10_000
#: Neighbours where there are more points than all can be, and by which kernels are compared.
SWSGP_NEIGHBORS = 32
#: Inducing points, of the rows, up to which "auto" polishes.
POLISHED_SHARE = 0.25
#: Inducing points, of the rows, up to which "auto" takes centres of clusters of each class.
CLUSTERED_SHARE = 0.3
#: Rows up to which all are neighbours, at the cost of one factor: q(u) then is the exact GP.
SWSGP_EXACT_ROWS = 2500
#: The same of labels and counts and one latent function; of c with as many numbers, c M^2.
SWSGP_FULL_ROWS = 1000
#: Of logs of amplitude and length scales, by default kernels: of sparse-within-sparse GPs of fewer
#: neighbours than labels, as their scales do not follow labels left out (500 digits: log loss .070,
#: .113 where they do); of others where labels beside the most frequent class are fewer than such a
#: number and share, for the same reason. Of 1000 observations, 11 to 31 of a rare class
#: (tests/benchmarks/bench_rare_class.py), a dense GP's mean log-loss exceeds the truth's by .0041
#: with both, .0041 with the prior alone, .0050 without the labels left out alone and .0061 with
#: neither (seeds 100 to 119); of seed 208 by .0064, .0333, .0077 and .0309. Of 700 balanced labels
#: the prior loses .007 on kin40k and .002 on spambase.
LABEL_SCALE_STD, RARE_LABELS, RARE_SHARE = 1.0, 30, 0.1
#: The same by default kernels of no more than `FEW_LABELS` labels. Log loss of QSGP, four parts of
#: seven data sets each: from 20 labels .013 less than without in the mean, from 60 .012, from 150
#: .009, at worst .007 more and at best .06 less; of generated classes, eight of each of 17 kinds,
#: .016 more (20 labels that lie apart) to .15 less, where the evidence of 12 made an amplitude
#: without end. 1 is no better but for noise, and costs .03 of those apart.
FEW_LABEL_SCALE_STD = 2.0

# -- Log-normal targets

#: Observations, at least and at most, by which log y is chosen (300 and 1000 decide alike of
#: abalone, california, house_8L, powerplant and naval), and ratios of the greatest to the least y:
#: below, logarithms change nothing; beyond, y is rounded.
LOG_ROWS, LOG_RATIOS = (50, 500), (1.5, 1e12)

#: Noise that varies is chosen of so many observations, and where the effective number of distinct
#: ones, (sum w)^2 / sum w^2, is no smaller part of them: two thirds of the rows of keggdirected
#: repeat others, which the errors of distinct ones say nothing of, and would lose .1 nats.
NOISE_LEAST_ROWS, NOISE_EVENNESS = 100, 0.5

#: Of n observations and one more, how many may err grossly, by about as much as targets vary:
#: (n + 1) times their rate. Of 39 fits of 100 and 300 rows of 19 data sets densities held out gain
#: .043 nats in the mean, .004 in the median, .5 on gas and keggdirected, and lose .005 at worst
#: (naval, of no noise); 1 (Laplace's rule) .045 and .010, 2 .047 and .019.
GROSS_ERRORS = 0.5

# -- State space

#: Noise of a standardised target to start with.
SERIES_NOISE = 0.1
#: Whether log y of a series is modelled, by the evidence: times from which on, and nats to gain.
#: Of 110 forecasts of series of statsmodels and R 43 are of log y: .15 less NLPD in the median, and
#: 95% intervals cover .95 in place of .88; of 84 generated additive series none is. Nor does it pay
#: to ask that the later half of a series, one step ahead, be likelier, too.
LOG_LEAST_ROWS, LOG_NATS = 20, 3.0
#: Variance of a latent function to start with, in units of the link: probabilities of .1 to .9.
SERIES_LINK_VARIANCE = 4.0
#: A default length scale in units of the range of the times, and its bounds.
SERIES_SCALE, SERIES_SCALE_BOUNDS = 0.02, (6e-6, 1e3)
#: Bounds of a default variance, of a standardised target.
SERIES_VARIANCE_BOUNDS = (1e-6, 1e4)
#: Long over short length scale of the default kernel of two.
TWO_SCALES = 30.0
#: Rows up to which kernels of six states compete too: the time of a choice.
SIX_STATES_ROWS = 10_000
#: Of the evidence in an iteration, in nats, below which a search of few rows stops.
SERIES_LEAST_GAIN = 1e-3
#: The same of additive models of labels, an observation and at most in all: more iterations follow
#: the labels. Log loss of halves of iris, wine and breast cancer, two splits each, .33, .04, .16,
#: .06, .11 and .17 -> .25, .05, .14, .06, .09 and .13, of 150 moons and 300 of sums in 6 columns
#: within .008, in half of the seconds; 500 digits take 74 s of a processor, where one class of the
#: ten took 22.
ADDITIVE_LABEL_GAIN, ADDITIVE_LABEL_NATS = 1e-3, 0.5
#: Times are refused that lie so many of their ranges from 0 and that the rounding of their type
#: moves by so much of the mean gap: unix seconds of minutes in float32, and not normal numbers.
OFFSET_RANGES, LOST_GAP = 10.0, 0.1
#: Covariates of numbers up to which each is smooth, with 17 features; more of them are linear.
SMOOTH_COVARIATES = 4
#: Prior standard deviation of a coefficient left to the data: of standardised targets and features
#: (True), and on the scale of a link, where labels may be separated by a flag.
WIDE_PRIOR = {True: 100.0, False: 10.0}
#: Bins of a column of an additive model: see `skgp.inference.markov.additive_bins`.
COLUMN_BINS = 512
#: Rows up to which an additive model keeps them, for others to join.
STREAM_ROWS = 1000
#: Rows below which a coupling of classes is not chosen, and those by which it is.
COUPLING_ROWS, LEFT_OUT_ROWS = 100, 20_000

# -- The front door

#: Rows up to which fits are exact: 1000 take 2 s, so that 2000 take about 18, as 10000 by "qsgp" do
#: (8 to 26; tests/benchmarks/bench_front_door.py).
EXACT_ROWS = 2000
#: Matrices of the size of the covariance that an exact fit holds at most.
EXACT_MATRICES = 7
#: And besides, for each hyper-parameter of a kernel that is called: 4.5 of one or two, 2.3 of nine.
CALLED_MATRICES = 4
#: Matrices of new rows by training rows that an exact prediction holds at once.
TILE_MATRICES = 4
#: Pairs of new and training rows of a tile (8 MB: standard deviations of 1000 rows given 1000 take
#: .92 of the time with a quarter), and the fewest new rows, of which a triangular system still is
#: quick.
TILE_PAIRS, TILE_LEAST = 2**20, 256
#: Pairs beyond which NumPy keeps to one thread, .05 ms (on a busy machine two take 8 ms more), and
#: beyond which a prediction keeps to a budget.
FEW_PAIRS, LIMITED_PAIRS = 2**11, 2**18
#: Columns up to which a classifier takes neighbours beyond: as places on a map, they are close.
#: Regression leaves the choice to "qsgp" up to `MANY_PLACES` rows, beyond which "vecchia" takes
#: over: see there.
PLACES = 3
#: Rows from which regression on so few columns is that of "vecchia". NLPD in discs held out of
#: 4260 satellite temperatures .74 and .79 by "qsgp", .70 and .77 by "vecchia", of california 1.08
#: and 1.15, 1.11 and 1.17; of rows at random .27 and .27, .29 and .29, and 1.14 and 1.05, 1.15 and
#: 1.05. Of all temperatures 1.01 in discs and -.62 at random by "qsgp" (neighbours, 94 s), .55 and
#: -.56 by "vecchia" (inducing points by default, 89 s; .60 and -.56 without, 15 s).
MANY_PLACES = 10_000

# -- Vecchia approximations

#: H, and of it the neighbours of a prediction, whose outer half fades.
VECCHIA_NEIGHBORS, VECCHIA_PREDICTIVE = 20, 2
#: Rows that stand for all in a search.
VECCHIA_ROWS = 10_000
#: Labels from which hyper-parameters are learned.
VECCHIA_LABELS = 2_000
#: Columns up to which the order is maximin: 1.5 s for 100,000 rows of 2 columns, 27 s of 8, where
#: it takes 5% off the KL divergence in place of a third (tests/benchmarks/bench_vecchia.py).
VECCHIA_MAXIMIN_COLUMNS = 4

# -- Units of the inputs

#: Inputs are whole multiples of 2^-30 of their columns' scales. Rounding of 1e-16 moves one of some
#: 1e6 of them to the next; predictions move by less than 1e-7 of their standard deviations.
GRID_BITS = 30
