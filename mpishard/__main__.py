"""``python -m mpishard`` is the ``mpishard`` command."""

import sys

from mpishard.cli import main

sys.exit(main())
