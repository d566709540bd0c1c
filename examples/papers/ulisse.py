"""Experiments of Filippone and Engler, "Enabling scalable stochastic gradient-based inference for
Gaussian processes by employing the Unbiased LInear System SolvEr (ULISSE)", 2015.

    python examples/papers/ulisse.py --data-dir FOLDER
    python examples/papers/ulisse.py --data-dir FOLDER --quick
    python examples/papers/ulisse.py --data-dir FOLDER --figure 2 3 4 --data house_8L --rows 2000

=======  ===================================================================================
figure
=======  ===================================================================================
2        conjugate gradients, plain, in single precision and preconditioned: products with K,
         seconds and error by the condition number
3        ULISSE: products, spread and bias of the paper's weights and of the adaptive ones
4        error of stochastic gradients with one probe
5        concrete: SGLD as in the paper and the Langevin sampler of skgp, running statistics and
         R-hat, against exact importance sampling
6        the same on house_8L, without exact sampling
=======  ===================================================================================

Tables are printed and written to ``FOLDER/NAME.csv`` (``--out``), and drawn to ``NAME.png`` if
matplotlib is there. Seconds are the processor's, of all threads: set ``OMP_NUM_THREADS``.

``--data-dir`` holds one ``NAME.npz`` a data set with ``X`` (n, d), ``y`` (n,) and ``test_mask``.
Figures 2 to 4 take all rows of concrete and 1000 of house_8L, standardised, and hyper-parameters
drawn from the default priors; figure 6 takes 5000 rows (``--rows 0`` for all, whose preconditioner
alone is work of the cube of its rank) and ends a sampler after ``--seconds``, keeping what it drew.
Figures 5 and 6 say every half minute how far they are.

What differs from the paper: the paper finds that preconditioning gains little, for it tries
``K + delta I`` alone, whose systems need conjugate gradients again (figure 2 has it, delta the
better of two); a low rank of K gains a great deal. Its weights ``exp(beta r)`` are unbiased on
paper only: four coins are survived with probability 4.5e-5, so that what is seen in any number of
runs one can afford is the bias of conjugate gradients that stop early. Figure 3 shows bias and
spread as seen, and the spread by the formula of the variance; the paper shows the spread seen.
SGLD has 800 draws a chain and four chains, where the paper has 40000 and ten, and the metric of all
rows. Products by kd-trees and anchors are left out, and so is figure 1, whose priors the text
does not give. Gradients are by the logarithms of the hyper-parameters; residuals are relative to
the right-hand side.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from _runs import data_path
from _s2vgp_study import Study
from _ulisse_chains import figure5, figure6
from _ulisse_figures import draw
from _ulisse_gradients import figure4
from _ulisse_problem import load_problem
from _ulisse_systems import figure2, figure3
from s2vgp import print_tables, write_tables

FIGURES: dict[int, Callable[..., Study]] = {
    2: figure2,
    3: figure3,
    4: figure4,
    5: figure5,
    6: figure6,
}
DATA = {
    2: ("concrete", "house_8L"),
    3: ("concrete", "house_8L"),
    4: ("concrete", "house_8L"),
    5: ("concrete",),
    6: ("house_8L",),
}
ROWS = {6: 5000}  # of house_8L; 1000 in the other figures
QUICK_ROWS = 300


def main() -> int:
    """Run the figures that are asked for; print, write and draw each."""
    args = parse_arguments()
    for figure in args.figure:
        for name in chosen_data(args, figure):
            problem = load_problem(args.data_dir, name, rows_of(args, figure, name))
            bound = {"seconds": args.seconds} if figure == 6 else {}
            study = FIGURES[figure](problem, args.quick, **bound)
            print_tables(study)
            path = args.out / f"figure{figure}_{name}"
            write_tables(study, path.with_suffix(".csv"))
            draw(figure, study, path.with_suffix(".png"))
    return 0


def parse_arguments() -> argparse.Namespace:
    """What to run, where the data are and where the results go."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of NAME.npz files")
    parser.add_argument("--figure", nargs="+", type=int, choices=list(FIGURES), metavar="NUMBER")
    parser.add_argument("--data", nargs="+", choices=["concrete", "house_8L"], metavar="NAME")
    parser.add_argument("--rows", type=int, help="of house_8L (1000; 5000)")
    parser.add_argument(
        "--seconds", type=float, default=1800.0, help="of each sampler of figure 6 (1800)"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script out")
    parser.add_argument("--out", type=Path, default=Path("results/ulisse"), help="(results/ulisse)")
    args = parser.parse_args()
    args.figure = args.figure or list(FIGURES)
    needed = {name for figure in args.figure for name in chosen_data(args, figure)}
    absent = sorted(name for name in needed if not data_path(args.data_dir, name).exists())
    if absent:
        parser.error(f"--data-dir {args.data_dir} has no {', '.join(absent)}; choose by --data")
    return args


def chosen_data(args: argparse.Namespace, figure: int) -> list[str]:
    """Data sets of a figure that are asked for."""
    return [name for name in DATA[figure] if args.data is None or name in args.data]


def rows_of(args: argparse.Namespace, figure: int, name: str) -> int | None:
    """How many rows to take; None for all."""
    if args.quick:
        return QUICK_ROWS
    if name == "concrete" or args.rows == 0:
        return None
    return args.rows or ROWS.get(figure, 1000)


if __name__ == "__main__":
    sys.exit(main())
