"""One killable scoring process: `python -m reward_service.worker FD`, driven over a socket by reward_service.pool.

Imports only what the configured rules need, so that a killed worker is replaced in a fraction of a second.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from multiprocessing.connection import Connection

from reward_service.rules import Scorer, score_safely


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Protocol: receives the config, answers None or the reason why it cannot work; then receives lists of items and
    answers one result for each."""
    conn = Connection(int(sys.argv[1]))
    os.dup2(2, 1)  # what a user's function prints must not mix with the output of a command line
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    cfg = conn.recv()
    limit = int(float(cfg["options"].get("worker_memory_gib", 8)) * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        scorer = Scorer(cfg)
    except Exception as error:
        conn.send(f"{type(error).__name__}: {error}")
        return
    conn.send(None)
    while True:
        try:
            items = conn.recv()
        except EOFError:
            return
        for item in items:
            conn.send(score_safely(scorer, item))


if __name__ == "__main__":
    main()
