"""The first import of a program: while it makes its other imports, Ctrl-C ends it with one line."""

from minipar.robust_start import interrupt

interrupt.install()
