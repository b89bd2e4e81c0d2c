"""Configuration of the documentation site: ``make site``."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from sphinx.util import logging

from headway import __version__

logger = logging.getLogger(__name__)

project = "Headway"
author = project_copyright = "Headway contributors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["pictures/README.md"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4

# Docstrings write names in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
nitpicky = False
# Fences name what runs them ("python run", "sh run"); a fragment of JSON or TOML need not parse.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = f"Headway {__version__}"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {
        "font-stack": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif",
        "font-stack--monospace": "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace",
    },
}

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\[(?P<text>[^\]\n]+)\]\((?P<target>[^)\s#:]+)(?:#[^)\s]*)?\)")


def _name_files_outside(app: Any, page: str, content: list[str]) -> None:
    """Replace links to files outside docs/, which the site does not have, by their paths in the repository."""
    folder = (Path(app.srcdir) / page).parent

    def path(link: re.Match[str]) -> str:
        target = (folder / link["target"]).resolve()
        if target.is_relative_to(app.srcdir) or not target.is_relative_to(ROOT):
            return link[0]
        return f"{link['text']} (`{target.relative_to(ROOT)}`)"

    content[0] = _LINK.sub(path, content[0])


def _omit_module_docstring(_app: Any, what: str, _name: str, _obj: object, _options: Any, lines: list[str]) -> None:
    """Leave the introduction of a module to its page."""
    if what == "module":
        lines.clear()


def _load_lazy_names() -> dict[str, list[str]]:
    """Import the public names of every documented module, because autodoc sees only names that are loaded."""
    found = {}
    for page in (ROOT / "docs" / "reference" / "python").glob("*.md"):
        for name in re.findall(r"^\.\. automodule:: ([\w.]+)$", page.read_text("utf-8"), re.MULTILINE):
            module = import_module(name)
            found[name] = [public for public in getattr(module, "__all__", ()) if not public.startswith("_")]
            for public in found[name]:
                setattr(module, public, getattr(module, public))
    return found


PUBLIC = _load_lazy_names()


def _report_missing_names(_app: Any, env: Any) -> None:
    """Warn of public names that no page documents; constants without a comment are left out by autodoc."""
    documented = {name.rpartition(".")[2] for name in env.get_domain("py").objects}
    for module, names in PUBLIC.items():
        for name in names:
            value = getattr(import_module(module), name)
            if name not in documented and (inspect.isclass(value) or inspect.isroutine(value)):
                logger.warning("%s.%s is not in the Python reference", module, name)


def setup(app: Any) -> None:
    """Connect the hooks."""
    app.connect("env-check-consistency", _report_missing_names)
    app.connect("source-read", _name_files_outside)
    app.connect("autodoc-process-docstring", _omit_module_docstring)
