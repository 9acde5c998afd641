"""The garbage collector of a process that runs for long."""

import gc


def freeze_heap() -> None:
    """Exempt what the process has by now, mostly its code, from every later collection.

    A full collection takes 50 ms with Django in it, and the messages of a few batches bring one.
    """
    gc.collect()
    gc.freeze()
