"""Where the arrays of a learner lie on a mesh, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import braintrace
from braintrace import _jax, functional
from braintrace.errors import OptionError
from tests.devices import hlo
from tests.devices.cells import CELLS
from tests.devices.programs import call_of, output_of

CELL = CELLS['rnn']


def compiled():
    learner, dtype = functional.online(CELL.run), jnp.float32
    p, c, (xs, _) = CELL.params(dtype), CELL.carry(dtype), CELL.data(dtype)
    jax.eval_shape(learner.init, p, c, xs[0])
    return learner


def of_a_module(lanes: int):
    cell, x = braintrace.nn.MinGRUCell(2, 4), jnp.zeros((lanes, 2))
    return braintrace.compile(cell, 'D_RTRL', x, batch_size=lanes)


@pytest.mark.slow
def test_eight_devices_have_their_parts_and_say_so():
    (found,) = output_of('tests.devices.places')
    assert found['alone'] == [True, True, False, True, False]
    assert found['unshared'] < 1e-12
    assert all(8 * part == whole for part, whole in found['init']), found['init']
    module, report = found['module'], found['report']
    assert max(module['error'], module['exported']) < 1e-5
    assert 8 * module['shard'] == module['whole']
    assert report['held'] == pytest.approx(report['arguments'], rel=0.1)
    assert report['gradient'] == pytest.approx(report['moved'], rel=0.1)
    refused = found['refused']
    assert len(refused) == 6
    assert all("{'b': 4} of 4 devices, and the state on another one" in text for text in refused)
    exported = found['exported']
    assert exported['error'] < 1e-12
    of_params, of_state = exported['said']
    assert of_params.startswith('params/') and of_state.startswith('carry/h lies on 8 devices')
    assert all('`jax.device_put(tree, jax.devices()[0])`' in text for text in exported['said'])
    assert '`jax.device_get(learner.save())`' in module['said']
    assert max(found['explicit']) < 1e-12
    outside = found['outside']
    assert len(outside) == 6 and all('Run it inside of `with jax.set_mesh' in t for t in outside)


@pytest.mark.parametrize(
    'specs, axis, mesh, words',
    [
        ({}, 'x', {'b': 8}, r"batch_axis has 'x' for the lanes, an axis that the mesh has not"),
        ({}, 'b', {'b': 5}, r'cuts the lanes \(24\) along .b. into 5 parts'),
        ({'w': P(None, 'm')}, 'b', {'b': 8}, r"param_specs has 'm' for axis 1 of w"),
        ({'w': P(None, 'm')}, 'b', {'b': 8, 'm': 5}, r'cuts axis 1 of w \(32\)'),
    ],
)
def test_specs_that_do_not_fit_a_mesh_are_refused(specs, axis, mesh, words):
    whole = dict.fromkeys(CELL.shapes)
    mesh = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    with pytest.raises(OptionError, match=words):
        compiled().partition_specs(whole | specs, axis, mesh)


def test_a_mesh_is_a_mesh_and_the_report_needs_one():
    learner, whole = compiled(), dict.fromkeys(CELL.shapes)
    with pytest.raises(OptionError, match="mesh is 'b'; give a `jax.sharding.Mesh`"):
        learner.partition_specs(whole, 'b', 'b')
    with pytest.raises(OptionError, match='and mesh is left out'):
        learner.report.at(8, param_specs=whole)


def test_a_report_says_who_exchanges_what():
    whole, mesh = dict.fromkeys(CELL.shapes), AbstractMesh((4, 2), ('b', 'm'))
    at = partial(compiled().report.at, 16, batch_axis='b', mesh=mesh)
    lanes, both = at(), at(param_specs=whole | {'w': P(None, 'm')})
    assert lanes.share == at(param_specs=whole).share
    assert not lanes.share.units_apart and 'at each step' not in str(lanes)
    assert both.share.units_apart and both.share.gradient < lanes.share.gradient
    assert 'for each gradient, and inputs and states at each step' in str(both)


def test_a_report_of_a_module_takes_names_of_its_parameters():
    learner, mesh = of_a_module(4), AbstractMesh((2, 2), ('b', 'm'))
    at = partial(learner.report.at, 4, batch_axis='b', mesh=mesh)
    specs = {'W/weight': {'weight': P(None, 'm'), 'bias': P('m')}}
    shares = [at(param_specs=given).share for given in (None, specs)]
    assert [share.units_apart for share in shares] == [False, True]
    assert shares[1].held < shares[0].held


@pytest.mark.parametrize(
    'mesh',
    [
        AbstractMesh((1,), ('b',)),
        lambda: jax.make_mesh((1,), ('b',), axis_types=(jax.sharding.AxisType.Explicit,)),
    ],
    ids=['abstract', 'explicit'],
)
def test_a_module_is_placed_on_devices_with_automatic_axes(mesh):
    learner = of_a_module(3)
    before = learner.etrace.value['t'].sharding
    with pytest.raises(OptionError, match='with automatic axes: `jax.make_mesh'):
        learner.place(mesh() if callable(mesh) else mesh, batch_axis='b')
    assert learner.etrace.value['t'].sharding == before


def test_a_module_refuses_specs_of_another_model():
    learner = of_a_module(3)
    with pytest.raises(OptionError, match='the model has no such parameter'):
        learner.partition_specs({'w': P()})
    of_layer = {'weight': P(None, 'm'), 'bias': P('m')}
    specs = learner.partition_specs({'W/weight': of_layer}, 'b')
    traces = [s for s in jax.tree.leaves(specs.trace) if len(s) == 3]
    assert traces and all(spec == P('b', None, 'm') for spec in traces)


@pytest.mark.slow
@pytest.mark.parametrize('call', ['window', 'updates'])
def test_code_as_if_on_a_gpu_copies_no_trace(call):
    p, c, data = CELL.params(jnp.float32), CELL.carry(jnp.float32), CELL.data(jnp.float32)
    with _jax.as_if_on('cuda'):
        learner = functional.online(CELL.run)
        state = learner.init(p, c, data[0][0])
        program = jax.jit(call_of(learner, call), donate_argnums=(0, 1))
        text = program.lower(p, state, *data).compile().as_text()
    (trace,) = {leaf.shape for leaf in jax.tree.leaves(state.trace) if leaf.ndim == 3}
    shape = f'f32[{",".join(map(str, trace))}]'
    assert shape in text and hlo.copies(text, shape) == 0
