"""Sphinx configuration."""

import csv
import inspect
import re
from pathlib import Path

import skgp

HERE = Path(__file__).parent

project = "skgp"
author = "the skgp developers"
copyright = "the skgp developers"
version = release = skgp.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx-mathjax-offline",  # formulas without network
    "numpydoc",
    "sphinx_gallery.gen_gallery",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "_templates"]
autodoc_typehints = "none"  # numpydoc's sections state the types
autodoc_member_order = "bysource"
autosummary_generate = True
default_role = "py:obj"  # names in single quotes are code, and links where they are documented
numpydoc_show_class_members = False  # the template of classes chooses the members

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "auto_examples",
    "filename_pattern": r"plot_",
    "ignore_pattern": r"quickstart|papers",
    "subsection_order": [
        "../examples/compare",
        "../examples/regression",
        "../examples/classification",
        "../examples/counts",
        "../examples/series",
        "../examples/large",
        "../examples/uncertainty",
        "../examples/choice",
        "../examples/own",
    ],
    "backreferences_dir": "api/backreferences",
    "doc_module": ("skgp",),
    "download_all_examples": False,
    "show_signature": False,
    "capture_repr": ("_repr_html_",),
    "write_computation_times": False,
}

html_theme = "pydata_sphinx_theme"
html_title = "skgp"
html_static_path = ["_static"]
html_css_files = ["skgp.css"]
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 8,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "footer_start": [],
    "footer_end": [],
}
toc_object_entries_show_parents = "hide"
html_sidebars = {
    page: [] for page in ("index", "install", "which_estimator", "from_*", "comparisons")
}
html_show_sourcelink = False

# What most users set; every other parameter of an estimator is listed under "Other Parameters".
COMMON = set(
    """kernel alpha prior method likelihood link objective beta basis n_basis solver n_inducing
    n_neighbors class_weight optimizer n_restarts_optimizer normalize_y degrees_of_freedom
    random_state device n_jobs memory_budget verbose""".split()
)


def group_parameters(app, what, name, found, options, lines):
    """Move the parameters of an estimator that few set to numpydoc's section for these."""
    if what != "class" or not hasattr(found, "fit") or "Parameters" not in lines:
        return
    start = lines.index("Parameters") + 2
    end = lines.index("", start)
    common, expert, target = [], [], None
    for line in lines[start:end]:
        if not line.startswith(" "):
            target = common if set(re.split(r", | :", line)) & COMMON else expert
        target.append(line)
    other = ["", "Other Parameters", "----------------", *expert] if expert else []
    lines[start:end] = common + other


def write_defaults():
    """Write the parameters whose defaults differ between estimators."""
    public = [getattr(skgp, name) for name in skgp.__all__]
    estimators = [value for value in public if hasattr(value, "fit")]
    parameters = {e.__name__: inspect.signature(e).parameters for e in estimators}
    names = dict.fromkeys(name for found in parameters.values() for name in found)
    rows = {
        name: [repr(p[name].default) if name in p else "" for p in parameters.values()]
        for name in names
    }
    with open(HERE / "methods" / "defaults.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", *(re.sub("(?=Process|Regr|Class)", " ", name) for name in parameters)])
        for name, row in rows.items():
            if len(set(row) - {""}) > 1:
                writer.writerow([name, *row])


def setup(app):
    """Write the table of defaults; group parameters."""
    write_defaults()
    app.connect("autodoc-process-docstring", group_parameters, priority=400)
