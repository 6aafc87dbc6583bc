"""How far a long cell is: a line that is rewritten between the cases, never while one is being timed."""

import sys
import time

LINES = 20  # printed at the most where no notebook can rewrite a line


class Sized:
    """Items that are made one by one, each when it is asked for, and whose number is known before."""

    def __init__(self, n: int, items):
        self.n, self.items = n, items

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(self.items)


def progress(items, what="cases", skipped="nothing to measure"):
    """Yields `items`, and says before each how many of how many are done, its name, and the seconds until then.

    In a notebook it is one output, updated in place, so that a saved notebook has the last state alone; elsewhere up to
    LINES lines. An item's name is its `case`, or the first of a tuple. Where there are no items, `skipped` is printed.
    """
    total, start, show = len(items) if hasattr(items, "__len__") else None, time.perf_counter(), _shower()
    done = 0
    for done, item in enumerate(items):
        name = getattr(item, "case", item[0] if isinstance(item, tuple) else item)
        show(f"{_of(done, total)} {what}, {time.perf_counter() - start:.0f} s; now {name}", done, total)
        yield item
        done += 1
    if done:
        show(f"{_of(done, total)} {what}, {time.perf_counter() - start:.0f} s", done, total)
    else:
        print(skipped)


def _of(done, total) -> str:
    return f"{done}" if total is None else f"{done} of {total}"


def _shower():
    """callable(text, done, total) that shows the text in place of the one before."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if not hasattr(shell, "kernel"):

        def line(text, done, total):
            if total and done * (LINES - 1) // total > (done - 1) * (LINES - 1) // total:
                print(text, flush=True)

        return line
    from IPython.display import display

    handle = []

    def update(text, done, total):
        if handle:
            handle[0].update({"text/plain": text}, raw=True)
        else:
            handle.append(display({"text/plain": text}, raw=True, display_id=True))

    return update
