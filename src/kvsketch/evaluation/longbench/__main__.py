from __future__ import annotations

import sys

from kvsketch.evaluation.longbench import main

sys.exit(main())
