"""A receipt and a config with every key of their schema, and no meaning."""

from __future__ import annotations

from braintrace_receipts.schema import ARRAY, SCHEMAS


def full(name):
    """A value of a schema with each optional key, and two entries in each map and list."""
    return example(SCHEMAS[name])


def example(schema):
    if schema is ARRAY:
        return {'shape': [2, 2], 'dtype': 'float32', 'data': [0.1, -0.0, 1e-38, 3.0]}
    if 'anyOf' in schema:
        return example([one for one in schema['anyOf'] if one.get('type') != 'null'][-1])
    kind = schema.get('type', 'string')
    if kind == 'object':
        if 'properties' in schema:
            return {name: example(part) for name, part in schema['properties'].items()}
        return {name: example(schema['additionalProperties']) for name in ('a', 'b/c')}
    if kind == 'array':
        return [example(schema['items']), example(schema['items'])]
    plain = {'number': 0.5, 'boolean': True, 'integer': max(schema.get('minimum', 3), 3)}
    if kind in plain:
        return plain[kind]
    choices = [schema['const']] if 'const' in schema else schema.get('enum')
    prefix = 'sha256:' if schema.get('pattern', '').startswith('^sha256') else ''
    return choices[0] if choices else prefix + 'a' * 64
