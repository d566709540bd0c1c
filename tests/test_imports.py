"""The direction of imports inside skgp, read off the source: lazy imports count.

``estimators, displays -> models -> learning -> inference -> {data, kernels, likelihoods, priors,
samplers} -> optim -> linalg``, where ``blocks`` stands on ``data``. No model imports a model; the
rooms inside the braces do not import each other; below the estimators scikit-learn is present only
as ``sklearn.gaussian_process.kernels`` inside ``kernels/``. No room but ``likelihoods/`` asks of
what class a likelihood is, and numbers at module level stand in ``defaults.py``, but for shapes and
mathematical constants, which say so.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "skgp"
TOOLS = {"optim", "linalg"}
MIDDLE = {"data", "kernels", "likelihoods", "priors", "samplers"}
CORE = MIDDLE | TOOLS | {"blocks"}
ALLOWED = {
    "": {"estimators"},  # skgp/__init__.py: the public estimators, nothing else
    "estimators": {"models", "learning", "inference"} | CORE,
    "displays": {"estimators", "models", "learning", "inference"} | CORE,
    "models": {"learning", "inference"} | CORE,
    "learning": {"inference"} | CORE,
    "inference": CORE,
    "blocks": {"data"} | TOOLS,
    **{room: TOOLS for room in MIDDLE},
    "optim": {"linalg"},
    "linalg": set(),
    "datasets": set(),
}
WITH_SKLEARN = {"estimators", "displays", "datasets"}
KERNEL_CLASSES = "sklearn.gaussian_process.kernels"
LIKELIHOODS = {"Bernoulli", "Gaussian", "Laplace", "Likelihood", "Poisson", "StudentT"}


NAMES = re.compile(rf"\b({'|'.join(LIKELIHOODS)})\b")

parsed = functools.cache(ast.parse)


def inside(name: str, package: str) -> bool:
    """Whether the dotted ``name`` is ``package`` or lies in it."""
    return name == package or name.startswith(package + ".")


def resolve(node: ast.ImportFrom, package: tuple[str, ...]) -> str:
    """Absolute name of the module that ``from ... import`` names, seen from ``package``."""
    if node.level == 0:
        return node.module or ""
    base = package[: len(package) - (node.level - 1)]
    return ".".join((*base, node.module) if node.module else base)


def imported_names(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that a module imports, ``import_module("x")`` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve(node, package)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if function in {"import_module", "__import__"}:
                yield node.lineno, str(node.args[0].value)


def room(relative: Path) -> str:
    """The folder or single module of skgp/ that a path lies in; "" for ``skgp/__init__.py``."""
    first = relative.parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def offences(source: str, relative: Path) -> list[str]:
    """What the module at ``relative`` (a path inside skgp/) imports against the direction."""
    folder = room(relative)
    if folder not in ALLOWED:
        return [f"skgp/{folder} has no place in the direction of imports: add it to ALLOWED"]
    found = []
    for line, name in imported_names(parsed(source), ("skgp", *relative.parts[:-1])):
        target = name.split(".")[1] if inside(name, "skgp") and "." in name else ""
        if inside(name, "skgp") and target != folder and target not in ALLOWED[folder]:
            found.append(f"skgp/{relative}:{line} imports {name}")
        if folder == target == "models" and not relative.stem.startswith("__"):
            here, there = relative.parts[1].removesuffix(".py"), (*name.split("."), "", "")[2]
            if here != there:
                found.append(f"skgp/{relative}:{line} imports another model: {name}")
        if inside(name, "sklearn") and folder and folder not in WITH_SKLEARN:
            if not (folder == "kernels" and inside(name, KERNEL_CLASSES)):
                found.append(f"skgp/{relative}:{line} imports {name}")
    return found


def test_every_module_imports_in_the_direction_of_the_house():
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 10
    found = [
        line
        for path in paths
        for line in offences(path.read_text(encoding="utf-8"), path.relative_to(PACKAGE))
    ]
    assert not found, "\n".join(found)


def test_every_folder_is_a_package():
    # setup.py finds packages by their __init__.py: a folder without one is not installed.
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").is_file()]


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        ("linalg/cg.py", "from skgp.kernels.gram import gram"),
        ("linalg/cg.py", "from ..kernels import gram"),
        ("linalg/cg.py", "from .. import kernels"),
        ("linalg/cg.py", "import skgp"),
        ("linalg/cg.py", "import sklearn"),
        ("linalg/cg.py", "from sklearn.gaussian_process.kernels import RBF"),
        ("kernels/gram.py", "from skgp.likelihoods import Gaussian"),
        ("kernels/gram.py", "from sklearn.base import clone"),
        ("kernels/gram.py", "from sklearn.gaussian_process import GaussianProcessRegressor"),
        ("optim/loop.py", "def fit():\n    from skgp.models import qsgp"),
        ("optim/loop.py", "import importlib\nimportlib.import_module('skgp.likelihoods')"),
        ("inference/exact.py", "from skgp.learning import search"),
        ("data.py", "from skgp.kernels import gram"),
        ("models/dlm/fit.py", "from skgp.models.qsgp.plan import Plan"),
        ("models/dlm.py", "from .swsgp import fit"),
        ("learning/selection.py", "from skgp.models import qsgp"),
        ("learning/selection.py", "from sklearn.model_selection import StratifiedKFold"),
        ("linalg/cg.py", "from skgp.learning import choose"),
        ("models/qsgp/cg.py", "from ...estimators._base import Base"),
        ("models/qsgp/cg.py", "from sklearn.neighbors import NearestNeighbors"),
        ("models/qsgp/cg.py", "from sklearn.gaussian_process.kernels import RBF"),
        ("estimators/_qsgp.py", "from skgp.displays import Band"),
        ("estimators/_qsgp.py", "from skgp import __version__"),
        ("datasets.py", "from skgp.kernels import gram"),
        ("__init__.py", "from skgp.kernels import ActiveDims"),
        ("utils/misc.py", "import math"),
    ],
)
def test_offences_finds_an_import_against_the_direction(relative, source):
    assert offences(source, Path(relative))


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        ("linalg/cg.py", "import torch\nfrom .exceptions import NumericalWarning"),
        (
            "kernels/gram.py",
            "from sklearn.gaussian_process.kernels import RBF\nfrom ..linalg import cg",
        ),
        ("kernels/gram.py", "from sklearn.gaussian_process import kernels"),
        (
            "models/qsgp/cg.py",
            "from ...kernels import gram\nfrom . import basis\nimport skgp.linalg",
        ),
        ("models/qsgp/cg.py", "from skgp.learning import choose"),
        ("models/qsgp/cg.py", "from skgp.models.qsgp.plan import Plan"),
        ("learning/selection.py", "from skgp.linalg import cg\nfrom skgp.inference import exact"),
        ("inference/exact.py", "from skgp.data import Data"),
        ("estimators/_qsgp.py", "from sklearn.base import clone\nfrom skgp.models.qsgp import fit"),
        ("displays/band.py", "from skgp.estimators._base import Base"),
        ("datasets.py", "from sklearn.utils import check_random_state"),
        ("__init__.py", "from .estimators._qsgp import QSGPRegressor"),
    ],
)
def test_offences_accepts_an_import_in_the_direction(relative, source):
    assert not offences(source, Path(relative))


def type_checks(source: str) -> list[int]:
    """Lines that ask whether something is a likelihood of some class."""
    found = []
    if not NAMES.search(source):  # which spares the parsing
        return found
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {
            "isinstance",
            "issubclass",
        }:
            names = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node)}
            if names & LIKELIHOODS:
                found.append(node.lineno)
    return found


def tuned_constants(source: str) -> list[int]:
    """Lines of numbers at module level, but shapes, mathematical ones and intervals."""
    lines, found = source.splitlines(), []
    for node in parsed(source).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        span = lines[node.lineno - 1 : node.end_lineno]
        if any("# mathematical" in line or "# shape" in line for line in span):
            continue
        intervals = [
            part
            for part in ast.walk(node.value)
            if isinstance(part, ast.Call) and getattr(part.func, "id", "") == "Interval"
        ]
        bounds = {id(part) for interval in intervals for part in ast.walk(interval)}
        numbers = [
            part
            for part in ast.walk(node.value)
            if type(getattr(part, "value", None)) in (int, float) and id(part) not in bounds
        ]
        if numbers:
            found.append(node.lineno)
    return found


def in_package(check, exempt) -> list[str]:
    """What a check finds in the files of skgp, but those that are exempt."""
    return [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not exempt(path.relative_to(PACKAGE))
        for line in check(path.read_text(encoding="utf-8"))
    ]


def test_no_room_asks_of_what_class_a_likelihood_is():
    assert not in_package(type_checks, lambda path: path.parts[0] == "likelihoods")
    assert type_checks("if isinstance(likelihood, Gaussian):\n    pass") == [1]
    assert type_checks("isinstance(model.likelihood, (likelihoods.Poisson, int))") == [1]
    assert not type_checks("isinstance(x, Tensor)\nlikelihood.is_gaussian")


def test_numbers_at_module_level_stand_in_defaults():
    assert not in_package(tuned_constants, lambda path: path.name == "defaults.py")
    assert tuned_constants("import math\n_TOL = 1e-6\n_SIZES: tuple = (1, 2)") == [2, 3]
    assert tuned_constants("_SETTINGS = Settings(n_steps=100)") == [1]
    assert not tuned_constants("_ROWS = 4096  # shape: of a tile\nNAMES = ('a',)\nFLAG = True")
    assert not tuned_constants('RULES = {"n": [Interval(Integral, 1, None, closed="left")]}')
