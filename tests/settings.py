"""Settings of JAX under which calls are tried.

`STRICT` are settings that refuse what a program may do by mistake. They hold together, so one run
of a call under all of them shows what a run under each would.
"""

import contextlib

import jax

FLOAT64 = 'float64 by default'
STRICT = {
    'rank promotion': lambda: jax.numpy_rank_promotion('raise'),
    'dtype promotion': lambda: jax.numpy_dtype_promotion('strict'),
    'legacy keys': lambda: jax.legacy_prng_key('error'),
    'typed keys': lambda: jax.enable_custom_prng(True),
    'reused keys': lambda: jax.debug_key_reuse(True),
    'NaNs': lambda: jax.debug_nans(True),
    'infinities': lambda: jax.debug_infs(True),
    'transfers': lambda: jax.transfer_guard('disallow'),
    FLOAT64: lambda: jax.enable_x64(True),
}
OTHERS = {
    'checks': lambda: jax.enable_checks(True),  # JAX refuses its own loops with reused keys
    'the rbg generator': lambda: jax.default_prng_impl('rbg'),
}


@contextlib.contextmanager
def under(settings):
    with contextlib.ExitStack() as stack:
        for setting in settings.values():
            stack.enter_context(setting())
        yield
