"""Checkpoints: saved under any layout, resumed under any other.

    DIR/step-00000020/
        manifest.json                the step, the run's flags, and for each file its size, SHA-256 and pieces
        rank-00000.safetensors       tensors "parameter/NAME", "exp_avg/NAME", "exp_avg_sq/NAME", each 1-D
        rank-00001.safetensors       ...

A piece is the elements start:stop, in row-major order, of one tensor-parallel rank's part of a parameter, or of the
whole parameter if it is not split. Each rank writes the elements that its optimizer owns, in every ZeRO stage. Nothing
is written twice, and no parameter is sent. A run that resumes joins each parameter from its pieces and takes its own
part, in whatever layout. Several hosts must share DIR's file system. NB: PyTorch's distributed checkpoints have the
same form: a `.metadata` file lists which chunk of which tensor is in which rank's file.

The state consists of the parameters, AdamW's two means and its step count, and the number of steps done. No random
state is needed: samples and dropout masks are counter-based random values (Philox) keyed by (seed, step, sample, name),
so the seed, which must agree, and the step are the position in every stream of every rank in any layout.

A run may be killed at any moment. Files are written into step-N.partial and synced, the manifest last. Then the
directory is renamed to step-N, which a file system does completely or not at all. After that, all but the last two
checkpoints are removed. save.py writes; load.py reads and needs no communicator, so one process can read a checkpoint.
"""

from minipar.train.checkpoint.load import KINDS, MANIFEST, STEP, Checkpoint, checksum, read_regular, restore_optimizer
from minipar.train.checkpoint.save import agreeing, checkpoints, prepare_directory, run_flags, save, writing

__all__ = [
    "KINDS", "MANIFEST", "STEP", "Checkpoint", "agreeing", "checkpoints", "checksum", "prepare_directory",
    "read_regular", "restore_optimizer", "run_flags", "save", "writing",
]  # fmt: skip
