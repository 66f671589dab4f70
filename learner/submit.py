"""`python -m learner.submit +experiment=r1_zero ...`: check the settings, then send the run to a cluster as a Ray job."""

from __future__ import annotations

import sys

from cluster.jobs import submit
from learner.main import load

if __name__ == "__main__":
    sys.exit(submit.main(sys.argv[1:], load))
