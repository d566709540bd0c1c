"""Constants of the searches for hyper-parameters and of choices, each with what chose it."""

from typing import Any

# ---- Choices by held-out data (selection.py)

#: Nats an observation below which a gain is none: .3% of the loss of a fair coin, .69.
LEAST_EFFECT = 2e-3
#: Share of the loss of labels below which a gain is none.
LABEL_SHARE = 0.02

# ---- Evidence of few observations (kernel_choice.py, starts.py)

#: Columns of the group of relevant ones, at most.
MOST_GROUPED = 32
#: Log length scales to begin with of k relevant columns, relative to those of all: the root of k
#: and a bit more; and of the others, at which the kernel is nearly flat.
SHORT, LONG = 0.3, 2.0
#: Starts of columns that oscillate: factors by which their length scale is shorter than the shared
#: one, and standard errors by which the autocorrelation of residuals along them is above zero
#: (``bench_noise_free.py::test_oscillations``).
OSCILLATION_FACTORS, AUTOCORRELATED = (8.0, 16.0, 32.0, 64.0, 128.0), 4.0
#: Factor below their start of shared length scales from where separate ones are searched from the
#: start, too: 30 generated problems of one-hot columns gain .024 nats, 1.5 the same, 3 less, and
#: 16 other kinds are as they were.
FAR_BELOW = 2.0
#: Squared errors left out, relative to the noise, above which the noise to begin with is little,
#: too: of 37 kinds of generated problems of 60 to 300 rows it is better for one-hot columns of many
#: levels, codes for what is missing and few relevant ones of 150 columns, whose errors were above.
UNEXPLAINED = 2.0
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
#: Noise below which all observations judge it, how many of these at most, a tile of them, and their
#: neighbours. Among the inputs of protein are near ones whose targets differ: under the noise of
#: 1.5e-8 that 512 of 41157 training points chose, an observation in some thousand is impossible.
LITTLE_NOISE, JUDGED_ROWS, JUDGED_TILE, JUDGING_NEIGHBORS = 1e-2, 20_000, 256, 20
#: Shares of the variance of f, and of its length scales, where jitter exceeds the noise: smooth
#: functions of 2600 rows in three columns without noise, whose amplitude 100 falls to about 3.
VARIANCE_SHARES, LENGTH_SHARES = (0.1, 1e-2, 1e-3), (1.0, 0.5, 0.25)
#: Rows of a series, at most twice as many, on which other starts of a search are looked at: 24
#: evaluations of a dense evidence, .05 s.
SERIES_START_ROWS = 200
#: Rows of labels or counts on which they are looked at.
LATENT_START_ROWS = 300
#: Of numbers that stand for f (label_scales.py): noise to begin with and its bounds, relative to
#: their variance; and, of their precisions, how near the prior mean they are taken. Of 0 to 16, at
#: mean counts of .3, 1 and 3, 16 cost at most .004 nats per observation against equal precisions,
#: 1 up to .02; from 100 on none differs.
NUMBERS_NOISE, NUMBERS_NOISE_BOUNDS, NUMBERS_SHRUNK = 0.1, (1e-8, 1e1), 16.0
# Numbers of the covariances of observations that are scored together: 2 MB, which stay in a cache.
# 512 observations by 192 neighbours take .31 s, by 32 MB at once .43 s.
SCORED_NUMBERS = {"cpu": 2**18, "cuda": 2**22}
#: Noise variance of labels taken for numbers, relative to that of the signal: start and bounds.
LABEL_NOISE, LABEL_NOISE_BOUNDS = 0.2, (1e-4, 1e1)

# ---- Newton's method for the mode (laplace_evidence.py)

MAX_NEWTON, MAX_HALVINGS = 100, 30
#: A step of squared length 1e-10 (in the metric of the Hessian) leaves about 1e-10 of error.
LAST_STEP = 1e-10

# ---- Minibatches and rows held out, of DLM and of sparse-within-sparse GPs
#: Adam's rate, that of hyper-parameters, which are logarithms.
LEARNING_RATE = 0.03
#: Rows held out at most; and rows below which too few could be held out to say when to stop a joint
#: search, or to couple classes.
MAX_HELD_OUT, FEW_ROWS = 4000, 100

# ---- QSGP: plans (design experiments on kin40k, protein, pol, keggdirected and MNIST) -----------
#: Observations of an exact GP whose factor is kept.
FACTOR_ROWS = 4_000
#: Observations of an exact GP, its factor dropped after the solve.
CHOLESKY_ROWS = 16_000
#: Features of a streaming Gram matrix of m x m float64: 0.5 GB, 44 s on kin40k.
CHOLESKY_FEATURES = 8_192
#: Of a Gram matrix of features, n m^2: about a minute on two cores.
GRAM_FLOPS = 8e12
#: Features of partial_fit, whose first call cannot know how many rows will come.
STREAMING_FEATURES = 1_024
#: The paper's m.
STOCHASTIC_FEATURES = 100_000
#: Neighbours of local regression.
N_NEIGHBORS = 128
#: Scales that they come from: all rows, one in 16, one in 256.
N_SCALES = 3
#: Search for hyper-parameters where all observations predict. Given the nearest alone, long length
#: scales cannot be told from short ones: those of a sine plus a product (bench_front_door.py, n =
#: 6000) went from 2.6 to 5.1, and the exact GP's log density of held-out data from .89 to .70 nats.
#: With three scales .89; the cost is .016 of .71 on kin40k, .005 of 1.07 on pol. What is found is
#: compared with its start by more neighbours.
GLOBAL_SEARCH: dict[str, Any] = {"n_scales": N_SCALES, "n_compared": 192, "n_score_rows": 512}
#: Columns up to which, and observations beyond which, the joint likelihood is searched too, and
#: neighbours by which the two kernels are compared. Of 4000 and 5000 training points of
#: satellite_temps log densities across gaps rise by .07 and .03 nats, between the points by -.002
#: and .008. Of 5000 points in 8 and more columns pol gains .04, house_8L and california lose .03,
#: kin40k .006; protein gained by its noise, which all observations judge since (`LITTLE_NOISE`). Of
#: 80,000 flights, in 8 columns, a stage of the search from the kernel that neighbours find gains
#: .22 and .33 nats (two seeds) in 10 to 14 s of a processor, three from the evidence of few
#: observations .28 and .41, in 33 to 39 s. Of all 246,000 either is ahead by draw: the latter goes
#: on from the former, too, and both are judged (test rows of three seeds: NLPD .84, .77, .73).
JOINT_COLUMNS, JOINT_ROWS, JOINT_NEIGHBORS = 3, 60_000, 100
#: Of conjugate gradients where the matrix is ill conditioned; three eighths of it elsewhere
#: (kin40k: 1500).
PRECONDITIONER_RANK = 4_000
#: trace(K) / noise, a bound on the condition number of K + noise I.
ILL_CONDITIONED = 1e7
#: Observations up to which a kernel matrix that memory holds is solved with, unasked. With that of
#: 70,000 flights conjugate gradients had not ended after 330 s of a processor; to compare them with
#: neighbours takes 5, and the whole fit then 54.
SOLVED_ROWS = 40_000
#: Root mean square of residuals over the standard deviation of noise at which conjugate gradients
#: end, and the least and greatest relative to y. At 1e-2 of y, whatever the noise, means of 600
#: points with noise of 1e-2 standard deviations were wrong by up to 5 of these; so by .2.
RESIDUAL_SHARE, RESIDUALS = 0.03, (1e-5, 1e-2)
#: Relative residual of the mean above which a solution by conjugate gradients is not used.
FALL_BACK_RESIDUAL = 0.1
#: Inducing points that replace it, or that stand for summands without a spectral density.
FALL_BACK_POINTS = 2_000
#: Square float64 matrices held at once by a solution with a Gram matrix, by one with the kernel
#: matrix, and by Newton's method beside the covariances that it ends with.
GRAM_MATRICES, DENSE_MATRICES, HESSIANS = 5, 3, 3
#: Largest numerical rank at which K is treated as of that rank (keggdirected: 240).
LOW_RANK = 1_000
#: Mean residual variance, relative to the noise, at which a rank is looked at.
LOW_RANK_RESIDUAL = 1e-2
#: Largest eigenvalue of what a low rank leaves of K, relative to the noise: observations would move
#: a function along it by a tenth of what they say. On 10000 rows of a product of two of four
#: columns the mean alone left eigenvalues of some 40 times the noise and an error of .17, with
#: noise of .1.
LARGEST_LEFT = 0.1
#: Observations among which that eigenvalue is estimated.
LEFT_ROWS = 1_000
#: Observations whose rank is looked at before that of all.
PROBED_ROWS = 5_000
#: Observations up to which Laplace noise has a basis function for each.
LAPLACE_ROWS = 3_000
#: n m^2 beyond them: about twelve passes over the data, some two minutes on two cores.
LAPLACE_FLOPS = 3e11
#: Numbers of features beyond which they are in float32, where that costs no accuracy.
SINGLE_SIZE = {"laplace": 10_000_000, "newton": 20_000_000}
#: Observations by which float32 is judged.
PROBE_ROWS = {"laplace": 64, "newton": 32}
#: Observations that the search for a classifier's hyper-parameters sees; of no more, the amplitude
#: is known.
SUBSET_ROWS = 1_000
#: Observations of a classifier with one basis function each.
FULL_ROWS = 2_000
#: Of a classifier (MNIST: 98.62% in 36 s; 8192 98.80% in 125 s).
MOST_FEATURES = 4_096
#: n m^2 of a classifier: about a minute of Newton steps.
NEWTON_FLOPS = 1.2e12
#: Of a classifier in blocks: times n m^2 that its steps take for each column, in exact Hessians.
SUMS_PASSES = 12
#: float32 roots kept in a fitted classifier.
FULL_COVARIANCE_NUMBERS = 4_000_000

# ---- QSGP: routes compared on held-out data where the kernel matrix is too large ----------------
#: Discs held out, a hundredth of the observations each, at most so many.
DISCS, DISC_SHARE, DISC_ROWS = 8, 0.01, 5_000
#: Observations scored of either kind, and standard errors that weights must gain on neighbours: a
#: gain in one disc of eight has a standard error as great as itself. Of 246,000 flights such a one
#: had taken 5698 functions, in four times the seconds.
SCORED, ROUTE_ERRORS = 256, 2.0
#: Observations and sizes at which weight space is tried.
TRIAL_ROWS, TRIAL_FEATURES = 20_000, (512, 1_024)
#: What stands for the exact GP.
EXACT_NEIGHBORS, EXACT_SCORED = 512, 64
#: Nats an observation by which a dearer route must be better.
LEAST_GAIN = 0.02
#: Of conjugate gradients; to compute an entry of K anew.
CG_ITERATIONS, ENTRY_FLOPS = 60, 40
#: About ten minutes of two cores, or of an accelerator.
CG_FLOPS = {"cpu": 1e13, "cuda": 3e16}

# ---- QSGP: amplitude, length scales and moderation of classifiers -------------------------------
#: Amplitudes tried, as multiples of the one learned on the subset.
AMPLITUDES = (0.25, 1.0, 4.0, 16.0, 64.0)
#: Columns of a problem of many classes that take part in the choice of the amplitude.
AMPLITUDE_COLUMNS = 3
#: Cost of an approximate leave-one-out score up to which it takes the place of held-out data.
LEAVE_ONE_OUT_FLOPS = 3e10
#: Observations held out, at most; as a share of all, a tenth.
AMPLITUDE_HELD_OUT = 5_000
#: Fewer observations hold no more than the search for hyper-parameters has seen: labels left out
#: correct its scales. Both corrections in a row lose on many observations: log loss of the ten
#: digits of MNIST, 60000 rows .0591 (.0559 without that by labels left out), 6000 rows .125 (.128).
SCALE_ROWS = 5_000
#: Of a trial of length scales.
SCALE_TRAINING, SCALE_HELD_OUT, SCALE_POINTS = 12_000, 4_000, 1_200
#: Factor of the length scales, and how often it is taken in one direction.
SCALE_STEP, SCALE_MAX_STEPS = 2**0.5, 4
#: Amplitudes fitted together in each trial.
SCALE_AMPLITUDES = (1.0, 4.0, 16.0)
#: Of the logarithms of standard deviation and length scales in a search by labels left out.
LEFT_OUT_STEP = 0.4
#: Of logarithms of variance and length scales, about the kernel of the evidence, in that search:
#: log losses from 20 and 40 observations of eleven sets fell (even digits .54 -> .49 and .33 ->
#: .31; the worst of seven samples of a plane in ten columns 1.4 -> .74), from 100 they stayed.
LEFT_OUT_STD = 2.0
#: Steps of amplitude and of length scales; both together, where labels tell their ratio alone. Of
#: grids of scales of 3000 to 4000 rows of seven sets the place of the least held-out loss has, of
#: Vecchia approximations, a log-loss on test rows of .078 for .088 and .071 for .086 (MNIST, two
#: samples), .132 for .139 (spambase), .0065 for .0127 (thyroid), .248 for .265 (kin40k), .028 for
#: .030 (ringnorm), and the same to .001 on flights and banana.
LEFT_OUT_MOVES = ((0, -1), (0, 1), (1, 0), (-1, 0), (1, 1), (-1, -1))
#: Kernels of such a search at most.
LEFT_OUT_TRIALS = 30
#: Standard errors by which a kernel must gain. From 200 and 1000 observations of ten sets, kernels
#: that gained by more predicted others better (digits .262 -> .170 and .078 -> .033, MNIST .169 ->
#: .120, ringnorm .118 -> .080); those that gained by less were worse in four cases of six.
LEFT_OUT_ERRORS = 2.0
#: Factors of the latent variance to choose among. In eighteen problems (59 to 900 observations of
#: nine data sets trained on, others judged by) the loss of 1/16 exceeded the least of these and
#: 1/64 by .010 nats per observation on average, that of 0 by .012, of 1/4 by .040, of 1 by .14.
MODERATIONS = (0.0, 1 / 16, 1 / 4, 1.0)
#: Where no observation can be left out that the hyper-parameters have not seen, unless labels left
#: out in turn are predicted better by two standard errors: from 100 labels of twelve sets they gain
#: .004 nats with a kernel given, .055 on digits; where a class is small and apart, .05 to .25.
FEW_ROWS_MODERATION = 1 / 16
#: Exponents of the coupling of classes to choose among.
COUPLINGS = (0.0, 0.25, 0.5, 0.75, 1.0)
#: Where observations are too few to choose by.
FEW_ROWS_COUPLING = 0.5
#: Below it the divergence holds nothing, and an observation left out would be all there was.
COUPLING_BETA = 1e-3

# ---- QSGP: stochastic gradients, relevance vectors ----------------------------------------------
#: Times the mean square of the targets, left on the support rows.
DIVERGED = 1.5
#: With a learning rate a tenth of the last one's.
MAX_RESTARTS = 3
#: Observations held out of ten times as many or more to scale the variances of a regression, to
#: within a tenth. `examples/papers/qsgp_curves.py` prints the densities without: tens of nats more.
CALIBRATION_ROWS = 300
#: Observations held out to decide about moderation; more would take long to predict with 1e6
#: functions.
MODERATION_ROWS = 300
#: Observations whose marginal likelihood gives relevance vectors their first kernel.
RELEVANCE_ROWS = 500
#: Observations whose evidence decides about shorter length scales.
RELEVANCE_SEARCH = 2_000
#: Nats by which the evidence of a halving may fall.
RELEVANCE_TOL = 1e-3
#: Halvings of the length scales, and the nats that one must gain: shorter ones take more
#: vectors.
RELEVANCE_HALVINGS, RELEVANCE_WORTH = 6, 10.0
#: Of the length scales, where half of the observations are vectors: of targets without a signal
#: all are, at a noise of nothing (tests/estimators/test_qsgp_relevance.py).
RELEVANCE_DOUBLINGS = 12

# ---- Gross errors among the targets -------------------------------------------------------------
#: Robust standard deviations beyond which an observation is an outlier.
OUTLIER_CUTOFF = 5.0
#: Of absolute residuals, and of |z|, z ~ N(0, 1): out of reach of up to 15% of wrong targets. The
#: median takes the hard rows of a function with plateaus for errors: 20% of the clean rows of pol,
#: of which the 85% quantile condemns 2%.
OUTLIER_QUANTILE, OUTLIER_QUANTILE_OF_NORMAL = 0.85, 1.4395
#: Neighbours whose median judges an observation; that predict it.
MEDIAN_NEIGHBORS, PREDICTING_NEIGHBORS = 11, 24
#: Searches, and the share of observations judged otherwise that is not worth another.
OUTLIER_ROUNDS, OUTLIER_CHANGED = 2, 0.01
#: Observations whose neighbours are gathered at once.
OUTLIER_BATCH = 256

# ---- searches from many starts (starts.py)
#: scikit-learn's own of L-BFGS-B: relative fall of the loss, greatest projected gradient, steps.
EXACT_TOL, EXACT_GTOL, EXACT_ITERATIONS = 2.2e-9, 1e-5, 15_000
#: Nats that a batched search still expects to gain when it ends; the best of them goes on.
BATCH_TOL = 1e-6
#: Numbers of the matrices of a batch: 32 MB each, of which some ten are held.
BATCH_NUMBERS = 2**22

# ---- Log-normal targets
#: Standard errors by which predictions of log y must be likelier, and those of y must not have the
#: smaller squared errors; and iterations of a search. Of 560 generated problems of 50 to 400 rows
#: in 3 columns (noise added to y, normal, heavy-tailed or exponential, or to log y or the root of
#: y) 153 take log y: .67 nats less on test rows in the mean, log RMSE .09 less, 3% of them worse in
#: density; at 3 standard errors 119, of which 1% are.
LOG_ERRORS, LOG_ITER = 2.0, 30
#: Variances that vary (`tests.benchmarks.bench_choices`): powers of e^g of f; prior variances of g
#: over the length scales of f times these; that of its constant; standard errors that what is held
#: out must gain. Of 108 samples of 100 to 400 rows of constant noise (normal, exponential, or of t
#: with 3 degrees of freedom) eight are taken, which cost .01 nats at worst and gain in the mean; of
#: 72 with gross errors 35, which gain .16 in the mean of all, by heavier tails, and cost none; of
#: 42 of 500 rows of fourteen real sets 34, which gain .23 in the mean and cost .03 at worst. Of 33
#: with normal densities of mean variances 17 gained .2, and of noise alone .06.
NOISE_EXPONENTS, NOISE_AMPLITUDES, NOISE_STRETCHES = (0.0, 0.5, 1.0), (0.3, 1.0, 3.0), (1.0, 4.0)
NOISE_LEVEL, NOISE_ERRORS = 4.0, 2.0
#: Errors that it is learned from, at least and at most, and by which it is judged; of more
#: observations than the least, neighbours that predict each. 100 neighbours, or 20,000 that judge,
#: are worth .01 nats on pol and house_8L for twice the seconds; 500 errors lose .1 and .3 there.
NOISE_ROWS, NOISE_JUDGED, NOISE_NEIGHBORS = (500, 1000), 4000, 50
#: Values of g in a mixture.
NOISE_NODES = 16
#: tau^2 and delta, the simplest first; mean variances fall by none (one fit of yacht lost .03). On
#: 1000 rows of nine data sets densities of others gain .04 nats in the mean, .11 at best (yacht).
NOISE_SCATTERS = (
    *((0.0, 0.0), (0.0, 0.25), (0.25, 0.0), (0.25, 0.25)),
    *((1.0, -0.25), (1.0, 0.0), (1.0, 0.25), (1.0, -0.5)),
)
#: Observations up to which all are judged, in so many folds.
NOISE_FOLDED, NOISE_FOLDS = 2000, 5
# ---- Vecchia approximations (on satellite_temps, blocks of training observations held out)
#: Observations of the dense evidence that a search starts from, and rows on which starts are
#: compared.
VECCHIA_START_ROWS = 500
#: Rows, and iterations, by which families of kernels are compared.
VECCHIA_FAMILY_ROWS, VECCHIA_FAMILY_ITER = 2_000, 15
#: Rounds more, of more than `JOINT_ROWS` observations, and nats an observation below which none
#: follows. Of 246,000 flights two take the likeliest from 1.10 and .78 (two seeds) to .63 and .71,
#: in 14 s of a processor; after the first families differ by less than draws of the rows.
VECCHIA_ROUNDS, VECCHIA_ROUND_GAIN = 2, 0.02
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
#: Gain, in nats per observation, below which none are taken: white noise gains .0005 by chance, the
#: functions above .01 to .07.
VECCHIA_GAIN = 1e-3
#: Noise variance, of that of f, above which few observations are all inducing points. Beside the
#: dense GP, means of an RBF kernel of 300 and 1000 rows in the plane are off by .3 of their
#: standard deviation at 2e-9, .01 at 1e-7 and 1e-4 at 1e-5. Of 1000 rows of kin40k 400 points
#: leave an error of .339, all .312; of 2400 .263 and .218.
VECCHIA_ROUNDED = 1e-7
#: Change of a log hyper-parameter in a stage below which no other follows.
VECCHIA_MOVED = 0.05
#: Blocks that are held out to compare families, their share of the observations each, and
#: neighbours of the predictions. Of satellite_temps Matern 1/2 has .02 nats less likelihood an
#: observation than Matern 3/2, and 60% of its error across gaps.
VECCHIA_BLOCKS, VECCHIA_BLOCK_SHARE, VECCHIA_HELD_NEIGHBORS = 20, 5e-3, 20
#: Probes of a log-determinant, of all columns, and observations beyond which fewer suffice for the
#: same error per observation.
VECCHIA_PROBES, VECCHIA_PROBED = 20, 10_000
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
#: Of labels, where these decide for some: at most so many, and beyond `VECCHIA_INDUCING` no more
#: than n c m^2 products. Held-out rows of kin40k above the median, 6000 to learn from, have a
#: log-loss of .192 by 400, .182 by 800 and .178 by 1200 points, in 9, 14 and 23 s; of spambase,
#: 3200, .180 by 400 and .178 by 1000. Neighbours beside them are chosen by the first
#: `VECCHIA_INDUCING`: of 10000 of kin40k in 4.5 s for 7.8, log-loss .164 for .163, error .070 for
#: .071, less than other draws of the points change.
VECCHIA_LABEL_INDUCING, VECCHIA_LABEL_PRODUCTS = 1_200, 10_000_000_000
#: Points left out in turn to choose how probabilities are moderated; times c^-1/2 of c columns.
VECCHIA_LEFT_OUT = 2_000
#: Labels held out to choose kernel, scales and inducing points; observations up to which all others
#: predict them, and of more the nearest of each. Of parts of the training data that these do not
#: see the log-loss falls from .487 to .468 (10000 flights) and from .213 to .208 (6000 of kin40k);
#: tests/benchmarks/bench_vecchia_classes.py has test parts, of which spambase gains nothing. 2000
#: labels in place of 1000 gain nothing but for noise: seven fits of 6000 to 10000 rows of MNIST,
#: flights and kin40k have log-losses from .005 less to .022 more.
VECCHIA_HELD_LABELS, VECCHIA_TRIAL_ROWS, VECCHIA_NEAR_LABELS = 1_000, 10_000, 20
#: Relative gradient of the modes that predict held-out labels.
VECCHIA_TRIAL_TOL = 1e-3
