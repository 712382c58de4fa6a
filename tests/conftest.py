"""XLA compiles quickly instead of well: compiling is most of what the tests cost."""
import os

import jax

jax.config.update('jax_disable_most_optimizations', True)

FLAGS = ['--xla_cpu_parallel_codegen_split_count=1']            # the test processes are parallel already
if jax.__version_info__[:2] == (0, 10):
    FLAGS += ['--xla_cpu_use_fusion_emitters=false']            # half of a compilation; JAX 0.12 aborts at flags that it does not know
os.environ['XLA_FLAGS'] = ' '.join([*FLAGS, os.environ.get('XLA_FLAGS', '')])
