! Heat on a ring of cells, and the loop that finds its beginning from readings at its end: see fortran_loop.py.
!
! The ranks divide the ring among themselves, and exchange the cells at the edges of their parts.  mpishard is two
! functions here, `ask` and `tell`; it knows nothing of this decomposition.

module heat_ring
  use, intrinsic :: iso_c_binding, only: c_int, c_double, c_funptr, c_f_procpointer
  use, intrinsic :: ieee_arithmetic, only: ieee_is_finite
  implicit none
  private
  public :: invert

  integer, parameter :: steps = 3
  real(c_double), parameter :: exchanged = 0.1_c_double  ! the part of a difference that two cells exchange in a step
  ! What can go wrong, as fortran_loop.py has it, too.
  integer(c_int), parameter :: ok = 0, too_few_cells = 1, no_mpi = 2, not_finite = 3

  abstract interface
    ! 1: value and gradient are wanted at x, the whole ring; 0: the minimisation has ended; -1: an error, end the loop.
    function ask_function(x) result(wanted) bind(c)
      import :: c_int, c_double
      real(c_double), intent(out) :: x(*)
      integer(c_int) :: wanted
    end function

    ! This rank's parts of value and gradient, and its status.  Not 0 is returned on all ranks if any status was not 0.
    function tell_function(value, gradient, status) result(failed) bind(c)
      import :: c_int, c_double
      real(c_double), value :: value
      real(c_double), intent(in) :: gradient(*)
      integer(c_int), value :: status
      integer(c_int) :: failed
    end function
  end interface

  interface  ! fortran_loop_mpi.c
    function place_in(comm, rank, ranks) result(error) bind(c)
      import :: c_int
      integer(c_int), value :: comm
      integer(c_int), intent(out) :: rank, ranks
      integer(c_int) :: error
    end function

    function pass_on(comm, sent, to, received, from) result(error) bind(c)
      import :: c_int, c_double
      integer(c_int), value :: comm, to, from
      real(c_double), value :: sent
      real(c_double), intent(inout) :: received
      integer(c_int) :: error
    end function
  end interface

contains

  ! The loop.  All ranks of comm call it together.
  function invert(comm, cells, readings, ask_pointer, tell_pointer) result(status) bind(c)
    integer(c_int), value :: comm, cells
    real(c_double), intent(in) :: readings(cells)
    type(c_funptr), value :: ask_pointer, tell_pointer
    integer(c_int) :: status

    procedure(ask_function), pointer :: ask
    procedure(tell_function), pointer :: tell
    real(c_double), allocatable :: x(:), gradient(:), heat(:)
    real(c_double) :: value
    integer(c_int) :: rank, ranks, first, last

    call c_f_procpointer(ask_pointer, ask)
    call c_f_procpointer(tell_pointer, tell)
    status = no_mpi
    if (place_in(comm, rank, ranks) /= 0) return
    status = too_few_cells
    if (cells < ranks) return
    status = ok

    first = rank * cells / ranks + 1
    last = (rank + 1) * cells / ranks
    allocate (x(cells), gradient(cells), heat(first - 1:last + 1))
    gradient = 0  ! stays so in the cells of the other ranks

    do while (ask(x) == 1)
      heat(first:last) = x(first:last)
      call diffuse(comm, rank, ranks, heat, status)
      heat(first:last) = heat(first:last) - readings(first:last)
      value = 0.5_c_double * sum(heat(first:last)**2)
      ! A rank that has found an error continues until `tell`: the others wait for its edges.
      if (.not. ieee_is_finite(value)) status = not_finite
      call diffuse(comm, rank, ranks, heat, status)  ! the adjoint: a step is a symmetric matrix
      gradient(first:last) = heat(first:last)
      if (tell(value, gradient, status) /= 0) exit
    end do
  end function

  ! All steps, on this rank's part of the ring; the first and last element are cells of the neighbours.
  subroutine diffuse(comm, rank, ranks, heat, status)
    integer(c_int), intent(in) :: comm, rank, ranks
    real(c_double), intent(inout) :: heat(:)
    integer(c_int), intent(inout) :: status
    integer :: step, n
    integer(c_int) :: left, right

    n = size(heat)
    left = modulo(rank - 1, ranks)
    right = modulo(rank + 1, ranks)
    do step = 1, steps
      if (pass_on(comm, heat(n - 1), right, heat(1), left) /= 0) status = no_mpi
      if (pass_on(comm, heat(2), left, heat(n), right) /= 0) status = no_mpi
      heat(2:n - 1) = heat(2:n - 1) + exchanged * (heat(:n - 2) - 2 * heat(2:n - 1) + heat(3:))
    end do
  end subroutine

end module
