"""How XLA compiles the tests: quickly instead of well, since compiling is most of their cost."""

import os

import jax

# Fusion emitters are half of a compilation in JAX 0.10. Later versions abort at an unknown flag.
HAS_FUSION_EMITTERS = jax.__version_info__[:2] == (0, 10)
FLAGS = [
    '--xla_cpu_parallel_codegen_split_count=1',  # the test processes are parallel already
    *(['--xla_cpu_use_fusion_emitters=false'] if HAS_FUSION_EMITTERS else []),
]
AS_USERS_HAVE_IT = {'xla_backend_optimization_level': 3, 'xla_llvm_disable_expensive_passes': False}
if HAS_FUSION_EMITTERS:
    AS_USERS_HAVE_IT['xla_cpu_use_fusion_emitters'] = True


def compile_quickly():
    """To be called before anything is compiled: XLA reads its flags once. Processes that a test
    starts compile so too.
    """
    jax.config.update('jax_disable_most_optimizations', True)
    os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'
    os.environ['XLA_FLAGS'] = ' '.join([*FLAGS, os.environ.get('XLA_FLAGS', '')])
