"""scikit-learn's own tests of its Gaussian processes, with our two classes in place of theirs.

Run as a program, ``python tests/estimators/test_sklearn_own_tests.py test_gpr.py``, it prints what
pytest says of the file of that name in the installed ``sklearn.gaussian_process.tests``.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import skgp

#: Tests of each file that cannot pass; `doc/from_scikit_learn.rst` gives the reasons.
FILES = {"test_gpr.py": (), "test_gpc.py": ()}


def main(file, *arguments):
    import sklearn.gaussian_process as original

    for name in ("GaussianProcessRegressor", "GaussianProcessClassifier"):
        if name in skgp.__all__:
            setattr(original, name, getattr(skgp, name))
    path = Path(original.__file__).parent / "tests" / file
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", "-c", os.devnull, "-rf"]
    return pytest.main([*options, *arguments, str(path)])


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_tests_of_scikit_learn_pass_with_our_classes(file):
    environment = os.environ | {"SKLEARN_TESTS_GLOBAL_RANDOM_SEED": "42"}
    command = [sys.executable, __file__, file]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    failed = re.findall(r"^FAILED .*::(\S+)", found.stdout, re.MULTILINE)
    passed = int(re.search(r"(\d+) passed", found.stdout)[1])
    assert sorted(failed) == sorted(FILES[file]), found.stdout
    assert passed >= 19 * len(failed) and passed > 20


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
