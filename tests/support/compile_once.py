#!/usr/bin/env python3
"""A compiler launcher for CMake that copies what it has compiled before.

``CMAKE_CXX_COMPILER_LAUNCHER=.../compile_once.py SPARSECONV_OBJECTS=FOLDER cmake ..``; without the second variable it
only runs the compiler. The native library is built several times: by pip into each environment of `.ci/run`, since its
build backend throws the objects away, and under the sanitizers for either side of it.

An object is the same where the compiler and its options are, and the text that the preprocessor makes. Of options,
those do not count that only the preprocessor reads, or that name files; of the text, where it was built. What was
compiled with a warning is compiled again, so that it is told again.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

_NAMES_FILE = ("-o", "-MF", "-MT", "-MQ")
_FOR_PREPROCESSOR = ("-D", "-I", "-M", "-c")


def main(command: list[str]) -> int:
    folder = os.environ.get("SPARSECONV_OBJECTS")
    if not folder or "-c" not in command or "-o" not in command:
        return subprocess.run(command, check=False).returncode
    key = _key(command)
    if key is None:  # the compiler says why
        return subprocess.run(command, check=False).returncode
    made, kept = Path(command[command.index("-o") + 1]), Path(folder) / key
    if kept.is_file():
        shutil.copyfile(kept, made)
        kept.touch()  # by which one knows what is not taken any more
        return 0
    done = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    sys.stderr.buffer.write(done.stderr)
    if done.returncode == 0 and not done.stderr:
        kept.parent.mkdir(parents=True, exist_ok=True)
        new = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(made, new)
        new.replace(kept)
    return done.returncode


def _key(command: list[str]) -> str | None:
    """Of the object that a command makes; None where its source cannot be preprocessed. Writes its list of headers."""
    preprocess = ["-E" if word == "-c" else word for word in command]
    at = preprocess.index("-o")
    del preprocess[at : at + 2]
    done = subprocess.run(preprocess, capture_output=True, check=False)
    if done.returncode:
        return None
    text = done.stdout.replace(os.fsencode(Path.cwd()), b".")
    compiler = os.path.realpath(shutil.which(command[0]) or command[0])  # g++ and c++ are often the same
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    # The last word is the source, which the text names.
    options = [
        word
        for before, word in itertools.pairwise(command[:-1])
        if before not in _NAMES_FILE and not word.startswith((*_NAMES_FILE, *_FOR_PREPROCESSOR))
    ]
    digest = hashlib.sha256(repr((compiler, options, version)).encode())
    digest.update(text)
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
