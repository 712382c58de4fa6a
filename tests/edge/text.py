"""What a program for other runtimes must not hold, read from its StableHLO."""

import re

VALUE = r'%[\w#]+'
WIDE = re.compile(r'tensor<(?:\d+x)*(?:f64|i64|ui64|complex<f64>)>')
# data movement: what follows a bool behind these is still made of it
MOVES = 'broadcast_in_dim|reshape|transpose|concatenate|slice|reverse|pad'


def faults(text: str) -> list[str]:
    """Custom calls, callbacks, 64-bit values, dynamic shapes, and products of what is a bool cast
    to a number, which IREE 3.13 refuses (``linalg.vecmat`` on i1).
    """
    found, cast = [], set()
    for line in text.splitlines():
        line = re.sub(r'dense<[^>]*> : tensor<\d+xi64>|array<i64[^>]*>', '', line)
        if 'func.func' in line:
            cast = set()  # names of values begin again
        op = re.search(r'stablehlo\.(\w+)', line)
        if 'custom_call' in line or 'callback' in line:
            found.append(f'custom call: {line.strip():.120}')
        if WIDE.search(line):
            found.append(f'64 bit: {line.strip():.120}')
        if re.search(r'tensor<[^>]*\?', line) or (op and 'dynamic_' in op[1] and 'dims' in op[1]):
            found.append(f'dynamic shape: {line.strip():.120}')
        if not op or not (made := re.match(rf'\s*({VALUE})(?::\d+)? =', line)):
            continue
        read = set(re.findall(VALUE, line.split('=', 1)[1]))
        if op[1] == 'convert' and re.search(r'\(tensor<[^>]*i1>\) -> tensor<[^>]*f\d\d>', line):
            cast.add(made[1])
        elif re.fullmatch(MOVES, op[1]) and read & cast:
            cast.add(made[1])
        elif op[1] in ('dot_general', 'convolution') and read & cast:
            found.append(f'product of a bool: {line.strip():.120}')
    return found
