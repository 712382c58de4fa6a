"""The site: `make docs` builds it, strictly; a public name that the reference leaves out is an
error.
"""

from __future__ import annotations

import importlib
import os
import re
import tomllib
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.ext.autosummary import autosummary_table
from sphinx.util import logging

import braintrace

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

HERE = Path(__file__).parent
PYPROJECT = tomllib.loads((HERE.parent / 'pyproject.toml').read_text(encoding='utf-8'))
PROJECT = PYPROJECT['project']
ADDRESS = PYPROJECT['tool']['hatch']['metadata']['hooks']['custom']['repository']
SOURCE = os.environ.get('REPOSITORY') or ('' if '/OWNER/' in ADDRESS else ADDRESS)
PUBLIC = bool({'READTHEDOCS', 'DOCS_ONLINE'} & os.environ.keys())  # may reach other sites

project = 'braintrace'
author = 'braintrace developers'
copyright = f'2026, {author}'
version = release = braintrace.__version__

extensions = [
    'myst_nb',
    'sphinx.ext.autodoc',
    'sphinx.ext.autosummary',
    'sphinx.ext.napoleon',
    'sphinx.ext.viewcode',
    'sphinx_copybutton',
    'sphinx_design',
]
extensions += (
    ['sphinx.ext.mathjax', 'sphinx.ext.intersphinx'] if PUBLIC else ['sphinx-mathjax-offline']
)
exclude_patterns = ['_build']
templates_path = ['_templates']
suppress_warnings = ['config.cache']  # `nb_*` settings that the cache of a build can not hold
intersphinx_mapping = {
    'python': ('https://docs.python.org/3', None),
    'jax': ('https://docs.jax.dev/en/latest', None),
    'numpy': ('https://numpy.org/doc/stable', None),
    'optax': ('https://optax.readthedocs.io/en/latest', None),
    'brainstate': ('https://brainstate.readthedocs.io', None),
    'flax': ('https://flax.readthedocs.io/en/latest', None),
}

html_theme = 'furo'
html_title = 'braintrace'
html_static_path = ['_static']
html_css_files = ['site.css']
html_copy_source = False
html_theme_options = {'navigation_with_keys': True}
if SOURCE:
    html_theme_options |= {'source_repository': SOURCE, 'source_branch': 'main'}
    html_theme_options |= {'source_directory': 'docs/'}
if (HERE / '_static/logo.svg').exists():
    html_logo = '_static/logo.svg'
if (HERE / '_static/favicon.svg').exists():
    html_favicon = '_static/favicon.svg'

myst_enable_extensions = ['attrs_inline', 'colon_fence', 'deflist', 'dollarmath']
myst_heading_anchors = 3
myst_html_meta = {'description': PROJECT['description']}
nb_execution_mode = 'force'
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True

autodoc_member_order = 'bysource'
autodoc_typehints = 'signature'
autodoc_typehints_format = 'short'
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
    'braintrace.errors',
    'braintrace.nn',
    'braintrace.functional',
    'braintrace.rules',
    'braintrace.tasks',
    'braintrace.tasks.events',
    'braintrace.adapters',
    'braintrace.kit',
    'braintrace.verify',
    'braintrace.compat',
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


NAMES = public_names()
braintrace.compat._remove()  # pages show what is there without it
CLASSES = tomllib.loads((HERE / 'reference/members.toml').read_text(encoding='utf-8'))
autosummary_context = {'made': CLASSES['made'], 'shown': CLASSES['members']}
# `braintrace.report` and `braintrace.Report` are one name to some file systems.
autosummary_filename_map = {
    name: f'{name}-function'
    for name in NAMES
    if name.islower() and name in {other.lower() for other in NAMES - {name}}
}


def forget_pages(app):
    """Remove generated pages of names that no table lists any longer."""
    lines = [
        line.strip()
        for page in (HERE / 'reference').glob('*.md')
        for line in page.read_text(encoding='utf-8').splitlines()
    ]
    listed = {line.rpartition('.')[2] for line in lines}
    for page in (HERE / 'reference/generated').glob('*.rst'):
        if page.stem.removesuffix('-function').rpartition('.')[2] not in listed:
            page.unlink()


def check_reference(app, env):
    """Warn, and so fail a strict build, of public names that no page documents."""
    for name in sorted(NAMES - env.domaindata['py']['objects'].keys()):
        log.warning('the reference leaves out %s; name it on a page of docs/reference', name)


def name_rows(app, doctree):
    """Give each row of a table of names the anchor of its name: links to the table find it."""
    for table in doctree.findall(autosummary_table):
        for row in table.findall(nodes.row):
            row['ids'].append(next(row.findall(pending_xref))['reftarget'])


def mark_numbers(app, doctree):
    """Mark short cells that begin with a number, so that none of it breaks from its unit."""
    for cell in doctree.findall(nodes.entry):
        if re.match(r'[-+]?[\d.]', text := cell.astext()) and len(text) < 30:
            cell['classes'].append('number')


def shape_page(app, page, template, context, doctree):
    """List only the branch of a page in its navigation, and offer no edit of a generated page."""
    if toctree := context.get('toctree'):
        context['toctree'] = lambda **how: toctree(**how | {'collapse': True})
    if page.startswith('reference/generated/'):
        context['page_source_suffix'] = ''


def setup(app):
    app.connect('builder-inited', forget_pages, priority=400)  # before pages are looked for
    app.connect('env-check-consistency', check_reference)
    app.connect('doctree-read', name_rows)
    app.connect('doctree-read', mark_numbers)
    app.connect('html-page-context', shape_page, priority=400)  # before the theme's
