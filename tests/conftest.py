"""XLA compiles quickly instead of well: compiling is most of what the tests cost."""
import jax

jax.config.update('jax_disable_most_optimizations', True)
