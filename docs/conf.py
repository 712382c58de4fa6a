"""The site: `make docs` builds it, strictly; a public name that the reference leaves out is an
error.
"""

from __future__ import annotations

import importlib
import os

from sphinx.util import logging

import braintrace

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

project = 'braintrace'
author = 'braintrace developers'
copyright = f'2026, {author}'
version = release = braintrace.__version__

extensions = [
    'myst_nb',
    'sphinx.ext.autodoc',
    'sphinx.ext.napoleon',
    'sphinx.ext.viewcode',
    'sphinx_copybutton',
    'sphinx_design',
    'sphinx-mathjax-offline',
]
exclude_patterns = ['_build']
suppress_warnings = ['config.cache']  # `nb_*` settings that the cache of a build can not hold

html_theme = 'furo'
html_title = 'braintrace'
html_static_path = ['_static']
html_css_files = ['site.css']
html_copy_source = False
html_theme_options = {'navigation_with_keys': True}

myst_enable_extensions = ['attrs_inline', 'colon_fence', 'deflist', 'dollarmath']
myst_heading_anchors = 3
nb_execution_mode = 'force'
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

autodoc_member_order = 'bysource'
autodoc_typehints = 'none'
autodoc_preserve_defaults = True
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_param = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 88
copybutton_prompt_text = r'>>> |\.\.\. |\$ '
copybutton_prompt_is_regexp = True

MODULES = (
    'braintrace',
    'braintrace.nn',
    'braintrace.functional',
    'braintrace.rules',
    'braintrace.tasks',
    'braintrace.tasks.events',
    'braintrace.adapters',
    'braintrace.kit',
    'braintrace.verify',
    'braintrace.receipts',
    'braintrace_receipts',
)
log = logging.getLogger(__name__)


def public_names() -> set[str]:
    """Every name in the ``__all__`` of a public module, in full."""
    found = set()
    for name in MODULES:
        found |= {f'{name}.{each}' for each in importlib.import_module(name).__all__}
    return found


def check_reference(app, env):
    """Warn, and so fail a strict build, of public names that no page documents."""
    for name in sorted(public_names() - env.domaindata['py']['objects'].keys()):
        log.warning('the reference leaves out %s; name it on a page of docs/reference', name)


def setup(app):
    app.connect('env-check-consistency', check_reference)
