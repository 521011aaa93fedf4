"""The command `python -m minipar.compare A B`, whose program is visualize/differences.py: it only reads files."""

import runpy

if __name__ == "__main__":
    runpy.run_module("visualize.differences", run_name="__main__", alter_sys=True)
