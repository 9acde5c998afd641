"""Settings of the interpreter that the threads of a worker or of consumers share."""

import gc
import sys

_SWITCH_SECONDS = 0.001


def settle() -> None:
    """Make a process that has loaded everything ready for long work in threads.

    1. What it has loaded is exempt from garbage collection. Every few batches of messages cause a
       full collection, which takes 50 ms with Django's objects in it.
    2. A thread that computes gives way after 1 ms instead of 5. A relay sends PostgreSQL several
       statements, one after the other, while another of its threads fills the producer.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_SECONDS)
