"""The command line: the console script `amk`, and `python -m amk`."""

from __future__ import annotations

import signal
import sys

from . import _PROGRAM, _amk


def main() -> None:
    # Python only notes Ctrl-C and acts on it between bytecodes, of which there are none meanwhile.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_amk.command_line(_PROGRAM, ["amk", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
