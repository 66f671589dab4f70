"""`python -m learner.submit +experiment=r1_zero ...`: send a run to a cluster as a Ray job.

The settings are checked here, and everything else that a job needs in cluster/jobs/submit.py.
"""

from __future__ import annotations

import sys

from cluster.jobs import submit
from learner.main import load

if __name__ == "__main__":
    sys.exit(submit.main(sys.argv[1:], load))
