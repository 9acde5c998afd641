"""What the threads of a worker or of consumers ask of the interpreter that they share."""

import gc
import sys

_SWITCH_SECONDS = 0.001


def settle() -> None:
    """Make a process that has loaded everything ready for long work in threads.

    1. What it has by now, mostly code, is exempt from garbage collection: a full one would take
       50 ms with Django in it, and the messages of a few batches bring one.
    2. A thread that computes makes room after 1 ms, not 5: a relay asks PostgreSQL several
       things, one after the other, while another of its threads fills the producer.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_SECONDS)
