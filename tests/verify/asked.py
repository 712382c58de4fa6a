"""What tests ask of the doctor."""

import warnings

from braintrace import functional, rules, verify
from braintrace.errors import BraintraceWarning
from tests.models.model import squared


def diagnosed(cell, xs, ys, params, carry, rule=None, loss=squared, steps=None, **options):
    """The diagnosis of a cell under a rule, D_RTRL where none is given."""
    learner = functional.online(cell, rule or rules.d_rtrl(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', BraintraceWarning)
        return verify.diagnose(learner, xs, ys, loss, steps=steps, params=params, carry=carry)


def row_of(diagnosis, path):
    return {row.path: row for row in diagnosis.rows}[path]


def said(diagnosis, start):
    """The one finding that starts so."""
    (text,) = [text for text in diagnosis.findings if text.startswith(start)]
    return text
