"""``python -m braintrace.receipts.verifier``, and ``python -m verifier`` beside this folder."""

import sys

from .command import main

if __name__ == '__main__':
    sys.exit(main())
