"""A command of ours as a child that cannot be orphaned: `python -m prefixroute.demo.child COMMAND …`.

Its standard input is a pipe from the parent. When that closes, in whatever way the parent ended, the child is
told to stop, as by a user.
"""

import os
import runpy
import signal
import threading


def main() -> None:
    threading.Thread(target=_stop_with_parent, name="parent", daemon=True).start()
    runpy.run_module("prefixroute", run_name="__main__", alter_sys=True)


def _stop_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
