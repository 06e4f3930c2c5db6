"""Sphinx's settings. build.py has laid out the sources in out/site-src."""
from pathlib import Path

project = "LLM training across many GPUs"
html_title = project
extensions = ["myst_parser"]
html_theme = "furo"
html_static_path = [str(Path(__file__).parent / "static")]
html_favicon = str(Path(__file__).parent / "static/icon.svg")
html_css_files = ["site.css"]
html_js_files = ["site.js"]
myst_heading_anchors = 4
exclude_patterns = ["**/*.txt"]
suppress_warnings = ["misc.highlighting_failure"]         # a README's code blocks are not complete programs
html_copy_source = False
html_show_sourcelink = False
html_theme_options = dict(top_of_page_buttons=[])
pygments_style = "xcode"
pygments_dark_style = "github-dark"
