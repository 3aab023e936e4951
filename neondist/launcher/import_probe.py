"""Probe of imports in a separate process: prints the name of each module, a tab, and the error, if any."""

import importlib
import sys

if __name__ == "__main__":
    for name in sys.argv[1:]:
        reason = ""
        try:
            importlib.import_module(name)
        except BaseException as error:
            text = " ".join(str(error).split())[:500]
            reason = text if type(error).__name__ == "MissingPackageError" else f"{type(error).__name__}: {text}"
        sys.stdout.write(f"{name}\t{reason}\n")
        sys.stdout.flush()
