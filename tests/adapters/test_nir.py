"""NIR graphs compute what their equations say, learn online, and come back as they were."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import Policy, adapters, functional, rules, verify
from braintrace.adapters._nir_graph import ARRAYS, KNOWN, NEURONS
from braintrace.errors import BraintraceWarning, OptionError, StructureError
from tests.adapters.nir_reference import DT, Drawn, flattened, simulated
from tests.compare import assert_close, errors
from tests.models.model import SEED
from tests.tiers import nightly, slow

param = pytest.param
nir = pytest.importorskip('nir')
RNG = np.random.default_rng(0)


def full(value, *shape):
    return np.full(shape, value)


def lif(n, kind=nir.LIF, **other):
    """Neurons that spike, now and then."""
    values = dict(tau=5e-3, tau_syn=3e-3, tau_mem=5e-3, r=1.0, v_leak=0.05, v_threshold=0.4)
    values |= dict(v_reset=-0.1, w_in=2.0) | (dict(r=150.0) if kind in (nir.I, nir.IF) else {})
    names = kind.__dataclass_fields__.keys() & values.keys()
    shape = n if isinstance(n, tuple) else (n,)
    return kind(**{name: other.get(name, full(values[name], *shape)) for name in names})


def pooling(size, stride):
    return nir.SumPool2d(*(np.array([n, n]) for n in (size, stride, 0)))


def affine(n_out, n_in):
    return nir.Affine(0.7 * RNG.normal(size=(n_out, n_in)), 0.1 * RNG.normal(size=n_out))


def wired(edges, **nodes):
    """``edges``: as in 'input fc lif output, lif back lif'."""
    ways = [way.split() for way in edges.split(',')]
    pairs = [pair for way in ways for pair in zip(way, way[1:])]
    return nir.NIRGraph(nodes, pairs, type_check=False)


def graph_of(shape_in, shape_out, edges, **nodes):
    ends = {'input': nir.Input(np.array(shape_in)), 'output': nir.Output(np.array(shape_out))}
    return wired(edges, **ends, **nodes)


def recurrent():
    nodes = {'fc1': affine(3, 4), 'lif1': lif(3, nir.CubaLIF), 'back': affine(3, 3)}
    nodes |= {'fc2': nir.Linear(RNG.normal(size=(2, 3))), 'lif2': lif(2)}
    return graph_of([4], [2], 'input fc1 lif1 fc2 lif2 output, lif1 back lif1', **nodes)


def spikes(steps, batch, *shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).random((steps, batch, *shape)) < 0.5, float)


def taken(graph, **options):
    return adapters.from_nir(graph, **{'dt': DT, 'reset': 'zero', **options})


def run(cell, params, carry, xs):
    def step(carry, x):
        y, carry = cell(params, carry, x)
        return carry, y

    carry, ys = jax.jit(lambda carry: jax.lax.scan(step, carry, xs))(carry)
    return ys, carry


def loss(z, y):
    return jnp.sum((z - y) ** 2)


def gradients(cell, params, carry, xs):
    """Those of D_RTRL and of backpropagation through time; nothing may be warned of."""
    learner = functional.online(cell, rules.d_rtrl(), policy=Policy(strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter('error', BraintraceWarning)
        state = learner.init(params, carry, xs[0])
    ys = jnp.full_like(run(cell, params, carry, xs)[0], 0.3)
    grads = jax.jit(learner.sequence_grad(loss, reduction='sum'))(params, state, xs, ys)[0]
    return grads, verify.bptt_gradients(cell, params, carry, xs, ys, loss), learner


# ---- outputs -------------------------------------------------------------------------------------

QUICK = (13, 26, 49)  # together they have every node


@pytest.mark.drawn
@pytest.mark.parametrize(
    'seed', [param(k, marks=slow if k in QUICK else nightly) for k in range(50)]
)
def test_a_random_graph_gives_what_nirs_equations_say(seed):
    drawn, rng = Drawn(nir, [SEED, seed]), np.random.default_rng([SEED, seed, 1])
    options = {'scheme': ['euler', 'exact'][seed % 2], 'reset': ['zero', 'subtract'][seed // 2 % 2]}
    shape = drawn.graph.nodes['input'].input_type['input']
    xs = (rng.random((15, 2, *shape)) < 0.4).astype(float)
    cell, params, carry = taken(drawn.graph, batch_size=2, **options)
    assert cell.late == drawn.late
    ys, carry = run(cell, params, carry, jnp.asarray(xs))
    want, potentials = simulated(drawn.graph, drawn.late, xs, DT, **options)
    assert_close(ys, want, absolute=1e-10)
    found = {name: own['v'] for name, own in carry.items() if 'v' in own}
    assert_close(found, {name: potentials[name] for name in found}, absolute=1e-10)


def test_one_sample_is_a_row_of_a_batch():
    graph, xs = recurrent(), spikes(6, 2, 4)
    batch, _ = run(*taken(graph, batch_size=2), xs)
    one, _ = run(*taken(graph), xs[:, 1])
    assert_close(one, batch[:, 1])


def test_what_waits_does_not_depend_on_the_order_in_which_a_graph_is_written():
    """Two ways lead round to n1, and the one through n2 is opened where it leaves n2."""
    nodes = {'n1': lif(3), 'n2': lif(3), 'w': affine(3, 3), 'back': affine(3, 3)}
    ways = 'input n1 w n2 output, n2 back n1, n1 back, n1 n1'
    graph = graph_of([3], [3], ways, **nodes)
    cell, _, _ = taken(graph)
    assert cell.late == {('n2', 'back'), ('n1', 'back'), ('n1', 'n1')}
    other = nir.NIRGraph(dict(reversed(graph.nodes.items())), graph.edges[::-1], type_check=False)
    xs = 9 * spikes(8, 2, 3)
    ys = [run(*taken(g, batch_size=2), xs)[0] for g in (graph, other)]
    assert ys[0].any() and (ys[0] == ys[1]).all()


def test_a_loop_around_a_subgraph_leaves_its_way_forward_alone():
    inner = graph_of([3], [3], 'input unit output', unit=lif(3))
    graph = graph_of([3], [3], 'input sub fc output, sub back sub', sub=inner, fc=affine(3, 3),
                     back=affine(3, 3))  # fmt: skip
    cell, _, _ = taken(graph)
    assert cell.late == {('sub.unit', 'back')}


def test_a_delay_of_a_step_opens_a_cycle_without_neurons():
    """What enters comes back after two steps, at half of its size."""
    graph = graph_of([1], [1], 'input d output, d half d', d=nir.Delay(np.array([2 * DT])),
                     half=nir.Scale(np.array([0.5])))  # fmt: skip
    ys, _ = run(*adapters.from_nir(graph, dt=DT), jnp.zeros((7, 1)).at[0].set(1.0))
    assert ys[:, 0].tolist() == [0, 0, 1, 0, 0.5, 0, 0.25]


@pytest.mark.parametrize('dtype', [bool, np.uint8])
def test_spikes_may_be_of_any_dtype(dtype):
    """Also where they are summed before anything else."""
    nodes = {'pool': pooling(2, 2), 'n': lif((1, 1, 1), nir.LI)}
    graph = graph_of([1, 2, 2], [1, 1, 1], 'input pool n output', **nodes)
    cell, params, carry = adapters.from_nir(graph, dt=DT)
    x = jnp.array([[[200, 200], [0, 200]]]).astype(dtype)
    assert_close(cell(params, carry, x), cell(params, carry, x.astype(float)))


def test_single_numbers_hold_for_all_elements_and_are_told_of():
    ways = 'input n0 n1 output'
    whole = graph_of([4], [3], ways, n0=nir.Affine(np.eye(3, 4), full(0.1, 3)), n1=lif(3))
    short = graph_of([4], [3], ways, n0=nir.Affine(np.eye(3, 4), np.array(0.1)), n1=lif(()))
    with pytest.warns(BraintraceWarning, match='n0/bias, n1/tau, .*where one for each element'):
        cell, params, carry = taken(short, batch_size=2)
    xs = spikes(6, 2, 4)
    want = run(*taken(whole, batch_size=2), xs)
    assert_close(run(cell, params, carry, xs), want)
    assert params['n0']['bias'].shape == (3,)
    back = adapters.to_nir(short, jax.tree.map(lambda a: a + 1, params))
    assert back.nodes['n0'].bias.tolist() == [1.1] * 3 and back.nodes['n1'].r.shape == ()


def test_shapes_that_nir_leaves_out_are_found():
    conv = nir.Conv2d(None, RNG.normal(size=(2, 1, 3, 3)), 1, 1, 1, 1, np.zeros(2))
    flat = nir.Flatten({'input': None}, 0, -1)
    graph = graph_of([1, 4, 4], [32], 'input conv flat output', conv=conv, flat=flat)
    graph.nodes['output'] = nir.Output(None)
    cell, params, carry = adapters.from_nir(graph)
    assert cell(params, carry, jnp.ones((1, 4, 4)))[0].shape == (32,)


# ---- learning ------------------------------------------------------------------------------------


def layers():
    """Graphs with one layer of neurons, where D_RTRL leaves out nothing."""
    conv = nir.Conv2d((4, 5), RNG.normal(size=(2, 2, 3, 2)), 1, (1, 0), 1, 1, np.zeros(2))
    conv1d = nir.Conv1d(6, RNG.normal(size=(2, 1, 3)), 2, 'valid', 1, 1, np.zeros(2))
    flat = nir.Flatten({'input': np.array([2, 2, 2])}, 0, -1)
    delay = nir.Delay(DT * np.array([2, 0, 1]))
    scale = nir.Scale(np.array([0.2, 0.3, -0.4]))
    below = {'w': conv, 'pool': pooling(2, 2), 'n': lif((2, 2, 2)), 'flat': flat}
    one = lambda ways, **nodes: graph_of([4], [3], ways, **nodes)
    return {
        kind: one('input w n output', w=affine(3, 4), n=lif(3, getattr(nir, kind)))
        for kind in ('LIF', 'CubaLIF', 'IF', 'LI', 'CubaLI', 'I')
    } | {
        'conv': graph_of([2, 4, 5], [3], 'input w pool n flat fc output', **below, fc=affine(3, 8)),
        'conv1d': graph_of([1, 6], [2, 2], 'input w n output', w=conv1d, n=lif((2, 2), nir.IF)),
        'delay': one('input w d n output', w=affine(3, 4), d=delay, n=lif(3)),
        'scale': one('input w s n output', w=nir.Linear(np.ones((3, 4))), s=scale, n=lif(3)),
    }


LAYERS = layers()
GATE = [('CubaLIF', 2), ('conv', None), ('delay', 2)]


def everything(graph):
    """The names of all arrays that may be learned."""
    names = 'weight bias scale threshold tau tau_syn tau_mem r v_leak v_threshold v_reset w_in'
    there = {what for node in flattened(graph)[0].values() for what in vars(node)}
    return there & set(names.split())


@pytest.mark.parametrize(
    'name,batch',
    [
        param(name, batch, marks=slow if (name, batch) in GATE else nightly)
        for name in LAYERS
        for batch in (2, None)
    ],
)
def test_one_layer_of_neurons_has_the_gradient_of_backpropagation(name, batch):
    graph = LAYERS[name]
    options = {'reset': 'subtract', 'batch_size': batch, 'surrogate': 'arctan'}
    cell, params, carry = taken(graph, learn=everything(graph), **options)
    xs = spikes(7, 2, *graph.nodes['input'].input_type['input'])
    xs = xs if batch else xs[:, 0]
    grads, bptt, learner = gradients(cell, params, carry, xs)
    assert_close(grads, bptt, 1e-10)
    assert not batch or all(np.any(g) for g in jax.tree.leaves(grads))
    state = {path for path, route in learner.routes.items() if route.kind == 'trace'}
    assert state == set(learner.routes) - {'fc/weight', 'fc/bias'}


@slow
def test_a_recurrent_network_learns_by_the_cut_graph_and_its_report_names_the_nodes():
    cell, params, carry = adapters.from_nir(recurrent(), dt=DT, reset='zero', batch_size=2)
    xs = 4 * spikes(7, 2, 4)
    grads, bptt, learner = gradients(cell, params, carry, xs)
    ys = 0.3 * jnp.ones((7, 2, 2))
    cut = verify.cut_bptt_gradients(cell, params, carry, xs, ys, loss, graph=learner.graph)
    assert_close(grads, cut, 1e-10)
    assert_close(grads['fc2'], bptt['fc2'], 1e-10)
    assert min(errors({**grads, 'fc2': {}}, {**bptt, 'fc2': {}}).values()) > 1e-3  # what is cut
    assert {route.kind for route in learner.routes.values()} == {'trace'}
    assert len(learner.graph.hidden_param_op_relations) == 3  # a bias is a part of its product
    text = str(learner.report)
    assert all(name in text for name in ('fc1/weight', 'back/bias', 'lif1/i', 'lif2/v'))


def test_a_strict_policy_takes_a_delay_of_any_length():
    ways = 'input w d n output'
    nodes = {'w': affine(3, 4), 'd': nir.Delay(full(70 * DT, 3)), 'n': lif(3)}
    cell, params, carry = taken(graph_of([4], [3], ways, **nodes))
    learner = functional.online(cell, policy=Policy(strict=True))
    learner.init(params, carry, jnp.ones(4))
    assert learner.report.exact and len(learner.graph.hidden_groups[0].paths) > 70


@pytest.mark.parametrize(
    'learn, name', [param('bias', 'conv', marks=slow), param('tau', 'LIF', marks=nightly)]
)
def test_one_kind_of_array_may_be_learned_alone(learn, name):
    graph = LAYERS[name]
    cell, params, carry = taken(graph, batch_size=2, learn=learn)
    assert {what for own in params.values() for what in own} == {learn}
    want, every, start = taken(graph, batch_size=2, learn=everything(graph))
    xs = spikes(7, 2, *graph.nodes['input'].input_type['input'])
    assert_close(run(cell, params, carry, xs), run(want, every, start, xs))
    grads, bptt, _ = gradients(cell, params, carry, xs)
    assert_close(grads, bptt, 1e-10)
    assert all(np.any(g) for g in jax.tree.leaves(grads))


# ---- and back ------------------------------------------------------------------------------------


def same(one, other):
    """Whether two graphs have the same nodes, edges, metadata and arrays, of the same dtypes."""
    if isinstance(one, nir.NIRGraph):
        fits = sorted(one.edges) == sorted(other.edges) and one.metadata == other.metadata
        fits = fits and one.nodes.keys() == other.nodes.keys()
        return fits and all(same(one.nodes[name], other.nodes[name]) for name in one.nodes)
    pairs = [(value, getattr(other, name)) for name, value in vars(one).items()]
    fits = [np.asarray(a).dtype == np.asarray(b).dtype for a, b in pairs if not isinstance(a, dict)]
    return (
        type(one) is type(other)
        and all(fits)
        and all(str(a) == str(b) if isinstance(a, dict) else np.array_equal(a, b) for a, b in pairs)
    )


@pytest.mark.parametrize('wide', [True, param(False, marks=slow)])
def test_a_graph_comes_back_as_it_was(wide):
    """Also where its numbers have more digits than the params."""
    with jax.enable_x64(wide):
        for seed in QUICK:
            graph = Drawn(nir, [SEED, seed]).graph
            graph.metadata['by'] = 'me'
            cell, params, _ = taken(graph, learn=everything(graph))
            assert same(adapters.to_nir(graph, params), graph)
            assert same(adapters.to_nir(cell.graph, {}), graph)


@slow
def test_what_is_written_and_read_again_gives_the_same_outputs_bit_by_bit(tmp_path):
    graph = Drawn(nir, [SEED, 26]).graph
    cell, params, carry = taken(graph, batch_size=2)
    params = jax.tree.map(lambda a: 1.1 * a, params)
    nir.write(tmp_path / 'back.nir', adapters.to_nir(graph, params))
    xs = spikes(12, 2, *graph.nodes['input'].input_type['input'])
    read = taken(tmp_path / 'back.nir', batch_size=2)
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (params, read[1]))))
    want, got = run(cell, params, carry, xs)[0], run(*read, xs)[0]
    assert want.any() and (got == want).all()


SINGLE = {kind: lif((1,), getattr(nir, kind)) for kind in NEURONS} | {
    'Affine': nir.Affine(np.eye(3), full(0.1, 1)),
    'Scale': nir.Scale(full(2.0, 1)),
    'Threshold': nir.Threshold(full(0.1, 1)),
}


@pytest.mark.filterwarnings('ignore:the NIR graph has a single number')
@pytest.mark.parametrize('kind', SINGLE)
def test_of_single_numbers_each_may_learn_alone_and_is_read_again(kind, tmp_path):
    graph = graph_of([3], [3], 'input w n output', w=affine(3, 3), n=SINGLE[kind])
    for name in ARRAYS[kind]:
        cell, params, _ = taken(graph, learn=name)
        params['n'][name] *= jnp.array([1.0, 1.1, 1.2])
        nir.write(tmp_path / 'a.nir', adapters.to_nir(graph, params))
        for read in (tmp_path / 'a.nir', nir.read(tmp_path / 'a.nir')):
            again, got, start = taken(read, learn=name)
            assert_close(got, params)
            assert_close(again(got, start, jnp.ones(3)), cell(params, start, jnp.ones(3)))


def test_two_names_of_one_node_get_numbers_of_their_own():
    shared = nir.Linear(np.eye(3, dtype=np.float32))
    graph = graph_of([3], [3], 'input one two output', one=shared, two=shared)
    new = adapters.to_nir(graph, {'one': {'weight': jnp.zeros((3, 3))}})
    assert not new.nodes['one'].weight.any() and new.nodes['one'].weight.dtype == np.float32
    assert (new.nodes['two'].weight == np.eye(3)).all() and (shared.weight == np.eye(3)).all()


# every field of a node is an array of the table, or is read by its layer's formula
FIELDS = {
    'AvgPool2d': 'kernel_size stride padding',
    'SumPool2d': 'kernel_size stride padding',
    'Conv1d': 'input_shape stride padding dilation groups',
    'Conv2d': 'input_shape stride padding dilation groups',
    'Flatten': 'start_dim end_dim',
}


@pytest.mark.parametrize('kind', KNOWN)
def test_no_field_of_a_node_is_left_out(kind):
    fields = getattr(nir, kind).__dataclass_fields__.keys()
    known = {*ARRAYS.get(kind, ()), *FIELDS.get(kind, '').split()}
    assert fields - {'input_type', 'output_type', 'metadata'} == known


# ---- bad input -----------------------------------------------------------------------------------


class Resonator(nir.Scale):
    """A node that nobody knows."""


def linear(n_out=3, n_in=3):
    return nir.Linear(np.ones((n_out, n_in)))


def conv(weight, stride=1, padding=0):
    return nir.Conv2d((4, 4), weight, stride, padding, 1, 1, np.zeros(len(weight)))


def small(edges='input fc lif output', n_in=3, n_out=3, **nodes):
    """A graph of which one node or edge is wrong."""
    return lambda: graph_of([n_in], [n_out], edges, **{'fc': linear(), 'lif': lif(3), **nodes})


THREE = np.array([3])
FAULTS = {  # what is told of it -> a graph
    "'lif' is of type Resonator, which has no formula; these have one: Affine, AvgPool2d": small(
        lif=Resonator(np.ones(3))
    ),
    "'lif' -> 'gone' names 'gone', which is no node": small('input fc lif output, lif gone'),
    r'the cycle .*fc.* has no neuron': small('input fc lif output, fc back fc', back=linear()),
    r"\['output', 'second'\] for Output": small(
        'input fc lif output, lif second', second=nir.Output(THREE)
    ),
    'leads into the input': small('input fc lif output, fc input'),
    r"the subgraph 'lif' has .*'lif.b', 'lif.c'": small(
        lif=wired('a b, a c', a=nir.Input(THREE), b=nir.Output(THREE), c=nir.Output(THREE))
    ),
    "two nodes are called 'fc.a'": small(
        fc=wired('a b', a=nir.Input(THREE), b=nir.Output(THREE)), **{'fc.a': linear()}
    ),
    r"no way leads from the input 'input' to \['fc'\]": small('input lif output, fc lif'),
    r"'fc' gives \(3,\) to 'lif' \(LIF, tau \(4,\).*, which does not take it": small(lif=lif(4)),
    r"'lif' gives \(3,\) to 'output' .*its shape is \(2,\)": small(n_out=2),
    r"'output' takes the sum of 'last', which gives \(4,\), and 'lif', which gives \(3,\)": small(
        'input fc lif output, input last output', 4, 4, fc=linear(3, 4), last=linear(4, 4)
    ),
    r"to 'pool' .*its window \(3, 3\) is larger": lambda: graph_of(
        [1, 2, 2],
        [1, 1, 1],
        'input pool output',
        pool=pooling(3, 1),
    ),
    "to 'w' .*padding 'same' goes with a stride of 1": lambda: graph_of(
        [1, 4, 4], [1, 2, 2], 'input w output', w=conv(np.ones((1, 1, 3, 3)), 2, 'same')
    ),
    r"'input' gives \(1, 4, 4\) to 'w' \(Conv2d, weight \(1, 2, 3, 3\)": lambda: graph_of(
        [1, 4, 4], [1, 2, 2], 'input w output', w=conv(np.ones((1, 2, 3, 3)))
    ),
    r"'input' has no shape; give it": lambda: wired(
        'input output', input=nir.Input(None), output=nir.Output(None)
    ),
    'has a tau of -1.0': small(lif=lif(3, tau=full(-1.0, 3))),
    'has a delay of -1.0': small(lif=nir.Delay(full(-1.0, 3))),
    'graph is Linear; give a nir.NIRGraph, or the path': lambda: linear(),
}
ARGUMENTS = {
    r"dt is None, and \['lif'\] need it": {'dt': None},
    'dt is 0.0': {'dt': 0.0},
    "dt=0.011 is more than twice the tau of 'lif', 0.005": {'dt': 0.011},
    "give reset='zero' .*or 'subtract'": {'reset': None},
    "reset is 'none'; choose 'zero' or": {'reset': 'none'},
    "choose 'euler' or 'exact'": {'scheme': 'rk4'},
    r"learn has \['weights'\]; what may be": {'learn': ('weights',)},
    r"learn has \['tau_mem'\], but the graph has only \['r', 'tau', 'v_leak'": {
        'learn': ('weight', 'tau_mem')
    },
    'batch_size is 0; give a whole number': {'batch_size': 0},
    "surrogate is 'step', which is no spike function": {'surrogate': 'step'},
}


@pytest.mark.parametrize('message', [*FAULTS, *ARGUMENTS])
def test_what_is_no_step_is_refused_with_the_place(message):
    graph, options = FAULTS.get(message, small())(), ARGUMENTS.get(message, {})
    with pytest.raises((OptionError, StructureError), match=message):
        taken(graph, **options)


def test_a_longer_step_may_be_taken_exactly():
    cell, params, carry = taken(small()(), dt=0.011, scheme='exact')
    assert np.isfinite(cell(params, carry, jnp.ones(3))[1]['lif']['v']).all()


def test_inputs_of_another_shape_are_refused():
    cell, params, carry = taken(small()(), batch_size=2)
    with pytest.raises(
        StructureError, match=r"x has shape \(3,\); the node 'input' takes \(2, 3\)"
    ):
        cell(params, carry, jnp.ones(3))


def test_a_file_that_is_no_graph_is_refused(tmp_path):
    (tmp_path / 'no.nir').write_text('no graph')
    with pytest.raises(OptionError, match=r'no\.nir is no file of HDF5 with a NIR graph'):
        adapters.from_nir(tmp_path / 'no.nir', dt=DT)
    with pytest.raises(FileNotFoundError, match='absent'):
        adapters.from_nir(str(tmp_path / 'absent.nir'), dt=DT)


@pytest.mark.parametrize(
    ('params', 'message'),
    [
        ({'gone': {'weight': np.ones((3, 3))}}, r"has no arrays \['gone/weight'\]; it has \['fc/w"),
        ({'fc': {'weight': np.ones((3, 2))}}, r'fc/weight has shape \(3, 2\), and \(3, 3\) in'),
        ({'fc': np.ones((3, 3))}, 'params are no dict node -> name -> array'),
        ({'whole': {'weight': 0.5 * np.ones((3, 3))}}, 'whole/weight is of int8 in the graph'),
    ],
)
def test_params_of_another_graph_are_refused(params, message):
    whole = nir.Linear(np.ones((3, 3), np.int8))
    graph = small('input fc whole lif output', whole=whole)()
    with pytest.raises(StructureError, match=message):
        adapters.to_nir(graph, params)


def test_a_step_takes_the_params_of_its_own_cell():
    """One that lacks an array would run with the number of the file."""
    cell, params, carry = taken(small()())
    (node, own), *_ = params.items()
    for other in ({}, {node: {w: jnp.ones(7) for w in own}}, params | {'gone': {'weight': 1.0}}):
        with pytest.raises(StructureError, match='params are not those of this cell'):
            cell(other, carry, jnp.ones(cell.graph.nodes['input'].input_type['input']))
