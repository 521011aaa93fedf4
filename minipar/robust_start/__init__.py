"""The start of a job and what it leaves behind, where MPI cannot report it.

Nothing in comm needs it to be understood.

interrupt    Ctrl-C while a program starts ends it with one line; first_import installs it
one_line     an error while the ranks start is one line
launchers    which launcher started this process, and whether it belongs to mpi4py's library
mpirun       what a rank says to MPICH's mpirun, over the connection that MPI uses later
start        the ranks meet, the shared memory of each host is checked once, MPI starts
watch        a rank that ends meanwhile is named
"""
