"""Sphinx configuration."""

import csv
import importlib.util
import inspect
from pathlib import Path

import skgp

project = "skgp"
author = "the skgp developers"
copyright = "the skgp developers"
version = release = skgp.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "numpydoc",
]
exclude_patterns = ["_build"]
autodoc_typehints = "none"  # numpydoc's sections state the types
autodoc_member_order = "bysource"
numpydoc_show_class_members = False  # api.rst chooses the members

# The examples are run and drawn where sphinx-gallery is installed (extra "doc").
HAS_GALLERY = importlib.util.find_spec("sphinx_gallery") is not None
if HAS_GALLERY:
    extensions.append("sphinx_gallery.gen_gallery")
    sphinx_gallery_conf = {
        "examples_dirs": "../examples",
        "gallery_dirs": "auto_examples",
        "filename_pattern": r"plot_",
        "ignore_pattern": r"quickstart|papers",
        "download_all_examples": False,
        "show_signature": False,
    }


def write_defaults():
    """Write the parameters whose defaults differ between estimators, for ``common.rst``."""
    public = [getattr(skgp, name) for name in skgp.__all__]
    estimators = [value for value in public if hasattr(value, "fit")]
    parameters = {e.__name__: inspect.signature(e).parameters for e in estimators}
    names = dict.fromkeys(name for found in parameters.values() for name in found)
    rows = {
        name: [repr(p[name].default) if name in p else "" for p in parameters.values()]
        for name in names
    }
    with open(Path(__file__).parent / "user_guide" / "defaults.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", *(name.replace("GP", "GP ") for name in parameters)])
        for name, row in rows.items():
            if len(set(row) - {""}) > 1:
                writer.writerow([name, *row])


def setup(app):
    """Write the table of defaults; tell the pages whether there is a gallery."""
    write_defaults()
    if HAS_GALLERY:
        app.tags.add("gallery")


html_theme = "pydata_sphinx_theme"
html_title = "skgp"
html_theme_options = {"show_toc_level": 2, "navigation_with_keys": False}
html_show_sourcelink = False
