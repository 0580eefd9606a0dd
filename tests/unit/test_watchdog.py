"""The time limit of a collective, from the steps of the run so far."""

from __future__ import annotations

import subprocess
import sys

from mpishard.comm.ledger import Ledger
from mpishard.comm.watchdog import TimeLimit


def test_a_choice_of_the_users_stands() -> None:
    limit = TimeLimit(7.5)
    for step, now in ((0, 0.0), (1, 10.0), (2, 500.0)):
        limit.note(step, now)
    assert limit.seconds == 7.5 and not limit.in_set_up and "7.5 s" in str(limit)


def test_the_set_up_ends_with_the_first_step_that_is_over() -> None:
    limit = TimeLimit(None)
    for step, now in ((0, 0.0), (0, 900.0), (1, 1000.0), (1, 1030.0)):  # it compiles in the first step, too
        limit.note(step, now)
        assert limit.in_set_up and limit.seconds == 1800
    limit.note(2, 1003.0)
    assert not limit.in_set_up and limit.seconds == 120


def test_steps_that_were_over_before_the_first_look_end_the_set_up() -> None:
    ledger, limit = Ledger(), TimeLimit(None)
    ledger.step = 1001
    limit.note(ledger.step, 0.0, ledger.any_over)
    assert limit.in_set_up
    ledger, limit = Ledger(), TimeLimit(None)
    for ledger.step in (1001, 1002, 1003):
        pass
    limit.note(ledger.step, 0.0, ledger.any_over)
    assert not limit.in_set_up and limit.seconds == 120


def test_long_steps_and_what_comes_between_them_lengthen_it() -> None:
    limit = TimeLimit(None)
    for step, now in ((101, 0.0), (102, 30.0), (103, 32.0)):
        limit.note(step, now)
    assert limit.seconds == 300
    limit.note(103, 400.0)  # under way, or in a collective that hangs
    assert limit.seconds == 300
    limit.note(110, 500.0)
    assert limit.seconds == 4680 and "10 times the longest step" in str(limit)


def test_another_run_of_an_optimizer_may_begin_anew() -> None:
    limit = TimeLimit(None)
    for step, now in ((1, 0.0), (9, 5.0), (1, 25.0)):
        limit.note(step, now)
    assert limit.seconds == 200


READING = """
import gc, sys, threading, time
import numpy as np
from mpishard.comm import ledger as module

ledger = module.Ledger()
ledger.active = (0.0, "data", 1, "all_reduce", np.dtype(float), 1, "", None, 0, (0, 1), False)
inside = {}
exec(compile("def deep(n): return n and deep(n - 1)", module._PACKAGE + "deep.py", "exec"), inside)
read = 0

def look():
    global read
    while read < 300:
        assert ledger.waiting_with_site.line
        read += 1

# While the reader collects garbage, the main thread runs on.
reader = threading.Thread(target=look, daemon=True)
sys.setswitchinterval(1e-4)
gc.set_threshold(1)
gc.callbacks.append(lambda *_: threading.current_thread() is reader and time.sleep(0.0001))
reader.start()
while reader.is_alive():
    inside["deep"](50)
print(read)
"""


def test_the_stack_of_a_main_thread_that_runs_on_is_read() -> None:
    ended = subprocess.run([sys.executable, "-c", READING], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "300\n"), ended
