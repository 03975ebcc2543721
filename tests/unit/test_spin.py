"""Which threads of an idle process spin, and that they are put last."""

from __future__ import annotations

import os
import threading

from headrace_engine.spin import calm_spinning_threads, spinning_threads


def test_a_thread_that_spins_is_found_and_put_last_and_a_waiting_one_is_left_alone() -> None:
    stop = threading.Event()
    ids: dict[str, int] = {}
    ready = threading.Barrier(3)

    def spin() -> None:
        ids["spinning"] = threading.get_native_id()
        ready.wait()
        while not stop.is_set():
            pass

    def wait() -> None:
        ids["waiting"] = threading.get_native_id()
        ready.wait()
        stop.wait()

    threads = [threading.Thread(target=target, daemon=True) for target in (spin, wait)]
    for thread in threads:
        thread.start()
    ready.wait()
    try:
        assert ids["waiting"] not in spinning_threads()
        calmed = calm_spinning_threads()
        assert ids["spinning"] in calmed
        assert ids["waiting"] not in calmed
        assert os.sched_getscheduler(ids["spinning"]) == os.SCHED_IDLE
        assert os.sched_getscheduler(ids["waiting"]) == os.SCHED_OTHER
        assert threading.get_native_id() not in calmed
    finally:
        stop.set()
        for thread in threads:
            thread.join()
