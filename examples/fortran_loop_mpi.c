/* What fortran_loop.f90 needs of MPI, for MPI libraries without Fortran modules, as those of the wheels are.
 * A communicator is Fortran's integer.  With mpifort, write `use mpi_f08` instead.  All return MPI's error code. */
#include <mpi.h>

int place_in(MPI_Fint comm, int *rank, int *size)
{
    int error = MPI_Comm_rank(MPI_Comm_f2c(comm), rank);
    return error ? error : MPI_Comm_size(MPI_Comm_f2c(comm), size);
}

/* Send one number to a rank, and receive one from another. */
int pass_on(MPI_Fint comm, double sent, int to, double *received, int from)
{
    return MPI_Sendrecv(&sent, 1, MPI_DOUBLE, to, 0, received, 1, MPI_DOUBLE, from, 0, MPI_Comm_f2c(comm),
                        MPI_STATUS_IGNORE);
}
