"""Sphinx configuration."""

import importlib.util

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


def setup(app):
    """Tell the pages whether there is a gallery: ``.. only:: gallery``."""
    if HAS_GALLERY:
        app.tags.add("gallery")


html_theme = "pydata_sphinx_theme"
html_title = "skgp"
html_theme_options = {"show_toc_level": 2, "navigation_with_keys": False}
html_show_sourcelink = False
