"""``python -m braintrace.receipts``: the command line of the verifier."""

import sys

from .verifier.command import main

if __name__ == '__main__':
    sys.exit(main())
