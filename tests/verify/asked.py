"""What tests ask of the doctor."""

import warnings

from braintrace import functional, rules, verify
from braintrace.errors import BraintraceWarning
from braintrace.verify import _measure
from braintrace.verify._activity import activity
from tests.models.model import squared


def diagnosed(cell, xs, ys, params, carry, rule=None, loss=squared, steps=None, **options):
    """The diagnosis of a cell under a rule, D_RTRL where none is given."""
    learner = functional.online(cell, rule or rules.d_rtrl(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', BraintraceWarning)
        return verify.diagnose(learner, xs, ys, loss, steps=steps, params=params, carry=carry)


def shown(cell, xs, params, carry):
    """By group: by what its activity shows, its silent and its saturated share, as a diagnosis has
    them, without the gradients of one.
    """
    learner = functional.online(cell, rules.d_rtrl())
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', BraintraceWarning)
        state = learner.init(params, carry, xs[0])
    graph = learner.compiled(params, carry, (xs[0],)).graph
    hidden = _measure.trace_norms(learner, graph, params, state, (xs,))[1]
    found = activity(graph, params, carry, (xs,), hidden)
    return {name: (by, silent.mean(), high.mean()) for name, (by, silent, high) in found.items()}


def row_of(diagnosis, path):
    return {row.path: row for row in diagnosis.rows}[path]


def said(diagnosis, start):
    """The one finding that starts so."""
    (text,) = [text for text in diagnosis.findings if text.startswith(start)]
    return text
