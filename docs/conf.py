"""Sphinx builds the documentation from this folder; the gallery runs the scripts in examples/."""

import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for hooks.py

project = "fullconformal"
author = "The fullconformal developers"
copyright = "2026, the fullconformal developers"
version = release = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["version"]

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "numpydoc",
    "hooks",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
autosummary_generate = True
autodoc_typehints = "none"
numpydoc_show_class_members = False
toc_object_entries_show_parents = "hide"
nitpicky = False

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"plot_",
    "within_subsection_order": "FileNameSortKey",
    "min_reported_time": 1,
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "write_computation_times": False,  # a page that would fetch scripts from elsewhere
}

# Pages without pages below them have nothing to navigate to.
html_sidebars = {
    page: [] for page in ("index", "tutorial", "choose", "trust", "costs", "maths", "findings", "peers", "extending")
}
howto = [f"howto/{page.stem}" for page in sorted((Path(__file__).parent / "howto").glob("*.rst"))]
html_theme = "pydata_sphinx_theme"
html_title = "fullconformal"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_math_renderer = "mathml"
html_theme_options = {
    "show_prev_next": True,
    "navbar_align": "left",
    "navbar_persistent": ["search-button"],
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": {"**": ["page-toc"], **{page: [] for page in howto}},  # their code needs the room
    "footer_start": ["copyright"],
    "footer_end": [],
}
