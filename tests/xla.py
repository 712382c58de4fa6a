"""How XLA compiles the tests: quickly instead of well, since compiling is most of their cost."""

import gc
import itertools
import os
from pathlib import Path

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


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell it by a file."""
    table = Path('/proc/self/statm')
    return int(table.read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE') if table.exists() else 0


_asked, _most = itertools.count(), [3 * 2**30]


def make_room() -> None:
    """Drop compiled programs where this process holds much memory, or half of the 65,530 mappings
    of it that Linux gives: each program takes some, and XLA ends in a segmentation fault where
    there are no more.

    It looks at every 16th call; what an allocator keeps for itself is not dropped again.
    """
    maps = Path('/proc/self/maps')
    if next(_asked) % 16 or not maps.exists():
        return
    if resident_bytes() > _most[0] or maps.read_bytes().count(b'\n') > 32_000:
        jax.clear_caches()
        gc.collect()
        _most[0] = max(_most[0], resident_bytes() + 2**29)
