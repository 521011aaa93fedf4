"""minipar: how large Transformers are trained across many machines, in Python one can read.

The house, from the ground up (imports point down only):

    train      the trainer, its command line, `--verify`
    parallel   strategies applied to a serial model: data parallelism and its buffers
    comm       two verbs (isend, irecv) and every collective written from them; knows no model
    nn         modules, GPT-2, optimizers; knows no rank
    autograd   Tensor, operations with forward beside backward
    backend    NumPy or CuPy
"""

__version__ = "0.1.0"
