"""Constants of kernels, each with what chose it."""

# ---- state-space forms
#: Greatest error of a truncated Fourier series, relative to its variance.
TOLERANCE = 1e-8
#: Terms of a Fourier series at most.
MAX_HARMONICS = 32
#: c of a Gamma mixture's variable, of the least errors for alpha between 0.5 and 5; points of its
#: grid at most; and the least log u, whose square root is then still a normal float.
CENTRE, MAX_GRID, LEAST_LOG = 0.2, 4096, -600.0
#: Entries of a block's matrices for the gaps that are worked on together: they stay in a core's
#: cache through all passes.
TILE_ENTRIES = 2**16

# ---- parts of default kernels of series
#: Variance of level and of the change over the range that a trend starts with, of that of y: wide,
#: for at 10 predictions before a series of steep trends are drawn to its mean.
TREND_START = 1e3
#: Variance of the change over the range of the line beneath a short series: what the squared range
#: of a uniform variable is over its variance. Of sixteen kinds of generated series of 12, 20 and 32
#: times, a third ahead, a line of the wide prior above leaves the NLPD .6 greater.
LINE_CHANGE = 12.0
# Least diffusion of a trend, which then is a line: of the variance over the cube of the span.
LEAST_DIFFUSION = 1e-8
#: Range of times whose cube, over which a diffusion is, is a number.
LEAST_SPAN = 1e-95
#: Length scale of a level that wanders, in ranges: its variance there is as wide as the trend's.
WANDER_SCALE = 20.0

# ---- distances
ORIGIN_ROWS = 32  # among which the origin is found: few, as tiles are many

# ---- gradients
CACHED = 2**18  # elements of a tile on a CPU: its temporaries stay in the cache
FEW_ROWS = 150  # up to which NumPy takes less time than torch
EXPONENTIALS = 2**11  # up to which NumPy's are quicker; of 1e4 torch's take .4 of the time
DIFFERENCES = 2**18  # of pairs of rows, up to which they stay in a core's cache
ALIVE = 8  # matrices of a tile's size held at once, by autograd at most

# ---- gram
# Elements of a piece whose temporaries stay in the cache and in the allocator's own memory.
PIECE = 2**18

# ---- linear kernels far from zero (scales.py)
# Squared distance of the rows from zero, in units of that from their middle, from which on the
# level is lowered, and to what: the digits of the evidence, and of 1e-9 in predictions.
FAR_LINEAR, LEVEL = 1e6, 1e3

# ---- operators
# Flops that an entry of a stored matrix is worth: it comes from memory.
PASS = 50
PANEL = 2048  # rows of a panel, side of a tile: large enough for full matrix-multiply speed
LEAST_SIDE = 64  # of a tile, however small the budget: 32 kB
# Of the budget, up to which a kernel matrix is stored: a preconditioner and the vectors of a
# solution take the other half.
STORED_SHARE = 0.5
MIRRORED = 512  # side of a tile that is written twice, the second time transposed
# Of squared distances. At 2.6e-4 (20 thousand rows of house_8L, some far out) gradients of the
# evidence move by 0.04 standard deviations of the posterior; at 0.1 matrices are indefinite.
DISTANCE_ERROR = 3e-5

# ---- pairwise
MOST_NUMBERS = 2e7  # differences kept
LARGEST_SQUARE = 1e300  # of squares, so that no sum of them overflows

# ---- scales
SCALE_ROWS = 16  # of which `length_scales` is the average
ALIKE = 1e-12  # within which length scales weigh the columns alike
ROUNDING = 1e-12  # relative to the values, below which a spread is none
# At least this share of the rows, and one row, is left out at either end.
TAIL = 0.05
# How many times the value of the middle rows takes outliers to explain: in 25,000 samples of 10
# rows of a normal distribution it was 6.4 at most, of 20 rows 1.8.
OUTLYING = 10.0
DISTINCT_ROWS = 10_000  # whose distinct values tell outliers: sorting more costs more than the rest
# Weights, of their median, beyond which rows have no more say in scales. Of 120 rows of a plane one
# of weight 1e5 makes the standard deviation of y a thirtieth, at which the search, within bounds
# for y of unit variance, finds noise alone: error 1.1 instead of .14.
MOST_WEIGHT = 100.0

# ---- state space, covariances within intervals
# Exponents of decay: of a gap over which all is forgotten (1e-16), and of a whole interval, where
# squares of exp are finite: eight such gaps. Terms that add up to covariances, in units of these.
FORGOTTEN, MOST_DECAY, LARGEST_TERM = 37.0, 300.0, 1e2
COVARIANCES = (
    2**16
)  # numbers of a block of those of components, whose temporaries stay in the cache

# ---- spectra
# Fewer signs than this give too few directions to pass for Gaussian ones, and save nothing.
MIN_HADAMARD = 32

# ---- spectral
# Elements of a piece of the projection that stay in a core's cache through all its passes.
PHASE_PIECE = 2**16
# Radians, beyond which rows are not told apart.
LARGEST_PHASE = 1e8
# Up to this many columns a second matrix product costs less than writing in strides.
TWICE = 32
# Bytes of draws that an instance keeps, those of the blocks used last: a few blocks are drawn once,
# and one block for several sets of rows (a minibatch, the support rows) is drawn once.
CACHE_BYTES = 16 * 2**20
# Of the memory free on another device, for the draws that were moved there.
DEVICE_SHARE = 0.25

# ---- training
CALLED_PAIRS = 2**18  # up to which a call of scikit-learn's kernel is as quick as a tile
#: Up to which distances of many pairs are quicker one by one (SciPy) than by a product of matrices:
#: tiles of 256 new rows by 1000 to 10000, RBF and Matern 3/2, 1 to 64 columns.
DISTANCE_COLUMNS = 8
CALLED_ROWS = 2000  # up to which its gradients of kernels without a closed form here are, too
#: Of the variance of RBF, what a dense covariance has more at distance 0: with 1e-14 Cholesky
#: factors of 400 and 500 times fail, with this they are good to a tenth of the least pivots.
NUGGET = 1e-13
