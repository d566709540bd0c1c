"""Packaging of skgp. Tool settings live in pyproject.toml, exact versions in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def version() -> str:
    """Read ``__version__`` from the source: an import would need torch, which may be missing."""
    source = (HERE / "skgp" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', source, flags=re.MULTILINE)
    if found is None:
        raise RuntimeError(
            'skgp/__init__.py has no line of the form __version__ = "..."; add it back'
        )
    return found.group(1)


EXTRAS = {
    "plot": ["matplotlib>=3.9"],
    "progress": ["rich>=13"],
    "mcmc": ["arviz>=0.18,<1"],
    "neighbors": ["faiss-cpu>=1.8"],
    "distributed": ["dask[distributed]>=2024.5"],
    "doc": [
        "matplotlib>=3.9",
        "numpydoc>=1.7",
        "pandas>=2.2",
        "pydata-sphinx-theme>=0.16",
        "sphinx>=7.3",
        "sphinx-gallery>=0.17",
        "sphinx-mathjax-offline>=0.0.2",
    ],
    "bench": ["celerite2>=0.3.2", "gpytorch>=1.13", "pytest>=8.1", "pytest-benchmark>=5"],
    "dev": [
        "hypothesis>=6.100",
        "mypy>=1.11",
        "pandas>=2.2",
        "polars>=1",
        "pre-commit>=3.7",
        "pytest>=8.1",
        "pytest-xdist>=3.6",
        "ruff>=0.8",
        "scipy-stubs>=1.14",
        "skops>=0.11",
    ],
}

setup(
    name="skgp",
    version=version(),
    description="Scalable Gaussian processes with the scikit-learn interface, on PyTorch",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the skgp developers",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    packages=find_packages(include=["skgp", "skgp.*"]),
    package_data={"skgp": ["py.typed"]},
    python_requires=">=3.11",
    install_requires=[
        "joblib>=1.4",
        "numpy>=2.0",
        "scikit-learn>=1.7,<2",
        "scipy>=1.13",
        "threadpoolctl>=3.2",
        "torch>=2.6,<3",
    ],
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)),
        "Topic :: Scientific/Engineering",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
