"""Constants of direct loss minimisation, each with what chose it."""

# ---- direct loss minimisation (models/dlm.py, sparse/, estimators/_dlm*.py)
# Numbers are entries of an n x M matrix; "rows" a column of them.
LEAST_BETA = 1e-8  # stands for a smaller beta where q(u) would have no variance, or no ridge
BLOCK_NUMBERS = 1e7  # held at once when the objective of all rows is evaluated: 80 MB
# From these on minibatches take over: in a joint search, and in one of q(u) alone, whose iterations
# are cheaper and fewer. Kin40k, n = 2000 to 10000, M = 200.
JOINT_NUMBERS, ALONE_NUMBERS = 1e6, 1e7
STEPS_PER_ITERATION = 2  # of minibatches
ALONE_SHARE = 0.15  # of the iterations, for q(u) alone before and after a joint search
SCORE_EVERY, SCORE_PATIENCE = 5, 6  # iterations between two scores; scores without a new best
SHORT_ROUNDS, SHORT_ROUND = 3, 15  # of L-BFGS, for inducing points (kin40k)
# Start by the ELBO. Kin40k, M = 500: 15 iterations of the collapsed ELBO on 20 M rows gained more
# than 200 steps of Adam, in half the time.
START_NUMBERS = 8e5
START_PER_INDUCING, MORE_PER_INDUCING = 8, 20  # rows, at least: of the start, and of its end
# That choose among families of kernels; more points would not rank them otherwise.
FAMILY_ROWS, FAMILY_POINTS, FAMILY_ITER = 1000, 200, 30
# Columns beyond which the kernel of a dense process of FAMILY_ROWS is a second start: of the 32 of
# pumadyn32nm the ELBO with 200 points found none in two splits of three, two of four in the third
# (NLPD 1.42, 1.42, .14; now -.10, -.12, -.11). Skillcraft and sml stay, in 1.5 times the seconds;
# pol has two optima and ends in the other one (-1.86 -> -1.40 with an error of .18 -> .12; of a
# part held out of its training data -1.30 -> -1.84 with .10 -> .16).
MANY_COLUMNS = 10
SCREEN_ROWS = 100  # on which kernels are compared by the evidence of few rows
FEW_STEPS = 3  # of the evidence, from other kernels than the best, before they are compared
# Grids of the posterior's width and of the noise, from the ELBO's to the log-loss's.
WIDTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
LESS_NOISE = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)
GRID_ROWS = 4000
# More inducing points: rows to learn q from and to judge it by; nats per observation that pay.
MAX_SIZE_ROWS, POINTS_WORTH = 20_000, 0.02
# Means after minibatches, both from the simplest: ridges in units of the one that the ELBO prefers,
# and shares of least squares.
BLEND_RIDGES = (1.0, 0.3, 0.1, 0.03)
BLEND_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Minibatches of Adam: shares of LEARNING_RATE, in standard deviations of the starting posterior
# (alpha), length scales (Z), relative changes.
RATE_SHARES = {"alpha": 5.0, "triangle": 2.0, "theta": 1.0, "likelihood": 1.0, "Z": 1 / 3}
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
# Entries of the c matrices n x M that are made of rows left out, to couple classes.
LEFT_OUT_NUMBERS = 1e7
# Of n_inducing="auto": distinct inputs up to which a process of Gaussian noise is exact (concrete,
# airfoil: NLPD .09, .18 below that of 200 points, in the same time); points to begin with beyond,
# and for what has no closed form; and what a gain on held-out data may raise them to.
EXACT_ROWS, AUTO_INDUCING, AUTO_SIZES = 3000, 200, (400, 800)
# Rows an inducing point up to which the process is nearly exact: a joint search only overfits.
FEW_PER_INDUCING = 2
# Rows up to which a dense process may be searched for hyper-parameters. Of 700 and 900 labels of 3
# to 8 classes its evidence, of 500 or of all, takes a quarter of the time of the ELBO and leaves
# log losses that are .012 higher in the mean of seven (by .069 to -.030); of 450 they are .009
# lower. Falls of the objective that end a search are `tol` for this many observations, of fewer as
# much greater: what is less than a tenth of a nat of all rows is noise.
DENSE_ROWS, TOL_ROWS = 500, 1e5
# Of the log ratios of length scales, a priori, in a dense search of the default kernels: less hurts
# where a column matters most, none overfits with many columns; counts, which tell more, do without.
RATIO_STD = 0.7
# Least noise, of the variance of y: on pol the joint log-loss drove it to 2e-7, for NLPD .07 more.
# Of Gaussian noise it is that of the ELBO where this is less (naval: NLPD .65 less). Of Student-t
# noise of variance 1e-8 (50 and 300 rows) the ELBO without a floor ended in optima 1 nat worse.
NOISE_FLOOR = 1e-4
