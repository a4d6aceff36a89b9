"""python -m examples.starting: programs as `python PROGRAM ARGUMENTS` would run them, one by one.

Each runs in a fork of one process that has torch already: importing it takes longer than what the
tiny trainings do. Reads JSON: {name: {"directory", "words", "output"}}; prints {name: exit code}.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any


def start(directory: str, words: list[str], output: str) -> None:
    """Become `python WORDS`, started in a directory; what it prints goes to a file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(directory)
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], directory
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, directory
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    import torch
    import torch._dynamo  # every optimizer asks for it

    torch.set_num_threads(1)
    codes = {}
    job: dict[str, Any]
    for name, job in json.load(sys.stdin).items():
        child = os.fork()
        if not child:
            return start(**job)
        codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.stdout.write(json.dumps(codes))
    return None


if __name__ == "__main__":
    main()
