! Fits a smoothed field to observations: a Fortran code that owns its loop, and asks an optimizer for the next point.
module fortran_loop
   use iso_c_binding
   implicit none

   abstract interface
      ! Writes the point where value and gradient are wanted; returns 0 when the minimisation has ended.
      function ask_c(x) bind(C)
         import :: c_int, c_double
         real(c_double), intent(out) :: x(*)
         integer(c_int) :: ask_c
      end function
      ! Takes this rank's part of the value and of the gradient.
      subroutine tell_c(value, gradient) bind(C)
         import :: c_double
         real(c_double), value :: value
         real(c_double), intent(in) :: gradient(*)
      end subroutine
   end interface

contains

   ! Rank number `rank` of `ranks` has every `ranks`-th observation; `evaluations` is how often it was asked.
   subroutine fit(n, rank, ranks, truth, ask, tell, evaluations) bind(C)
      integer(c_int), value :: n, rank, ranks
      real(c_double), intent(in) :: truth(n)
      type(c_funptr), value :: ask, tell
      integer(c_int), intent(out) :: evaluations
      procedure(ask_c), pointer :: next_point
      procedure(tell_c), pointer :: give
      real(c_double) :: x(n), gradient(n), row(n), residual, value
      integer :: i, j

      call c_f_procpointer(ask, next_point)
      call c_f_procpointer(tell, give)
      evaluations = 0
      do while (next_point(x) /= 0)
         value = 0
         gradient = 0
         do i = 1 + rank, n, ranks
            row = [(exp(-((i - j) / 1.0d0)**2), j = 1, n)]
            residual = dot_product(row, x - truth)
            value = value + 0.5d0 * residual**2
            gradient = gradient + residual * row
         end do
         call give(value, gradient)
         evaluations = evaluations + 1
      end do
   end subroutine

end module
