"""The command `python -m minipar.compare A B`, whose program is visualize/differences.py: it only reads files."""

import runpy

from minipar.pictures import full_name

if __name__ == "__main__":
    runpy.run_module(full_name("visualize.differences"), run_name="__main__", alter_sys=True)
