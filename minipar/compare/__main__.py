"""The command `python -m minipar.compare A B`."""

import sys

from minipar.compare.differences import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
