"""Seconds of importing brainstate, and of importing braintrace after it, printed as JSON."""

import time

start = time.perf_counter()
import brainstate  # noqa: E402, F401

middle = time.perf_counter()
import braintrace  # noqa: E402, F401

end = time.perf_counter()
print(f'{{"brainstate": {middle - start}, "braintrace": {end - middle}}}')
