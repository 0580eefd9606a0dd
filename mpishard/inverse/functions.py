"""The functions of the user, called as SciPy calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.arguments import returned, shown
from mpishard.inverse.result import OptimizeResult


class Functions:
    """A function, its gradient and its Hessian products.  Not collective.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args)``.
    jac : True or callable
        True: `fun` returns value and gradient; else ``jac(x, *args)`` is the gradient.
    hessp : callable, optional
        ``hessp(x, direction, *args)``: the Hessian at x times a direction.
    args : tuple
        Further arguments; one that is no tuple stands for itself.

    Raises
    ------
    TypeError
        If one is not callable.
    ValueError
        If there is no gradient.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        jac: bool | Callable[..., Any],
        hessp: Callable[..., Any] | None,
        args: Any,
    ) -> None:
        for name, function in (("fun", fun), ("hessp", hessp)):
            if not (callable(function) or (name == "hessp" and function is None)):
                raise TypeError(f"{name}={shown(function)} must be a function")
        if not callable(jac) and jac is not True:
            raise ValueError(
                f"jac={shown(jac)}: a gradient is needed; jac=True if fun returns (value, gradient), or jac=function"
            )
        self._fun = fun
        self._jac = jac
        self._hessp = hessp
        self._args = args if isinstance(args, tuple) else (args,)

    def value_and_gradient(self, x: Any, *samples: Any) -> tuple[float, Any]:
        """Value and gradient at a point.

        Parameters
        ----------
        x : array or FlatParameters
            The point.
        *samples : ndarray
            Those whose sum is wanted, where there are samples.

        Returns
        -------
        (float, object)
            The gradient as the user gave it.

        Raises
        ------
        TypeError
            If `fun` returned something else.
        """
        found = self._fun(x, *samples, *self._args)
        if callable(self._jac):
            gradient = self._jac(x, *samples, *self._args)
        elif isinstance(found, tuple | list) and len(found) == 2:
            found, gradient = found
        else:
            raise TypeError(
                f"fun must return (value, gradient), as jac=True says; it returned a {type(found).__name__}.  If it "
                "returns the value alone, give jac=function"
            )
        return number_of(found), gradient

    def product(self, x: Any, direction: Any, *samples: Any) -> Any:
        """The Hessian at a point times a direction.

        Parameters
        ----------
        x : array or FlatParameters
            The point.
        direction : 1-D array
            The direction.
        *samples : ndarray
            As for `value_and_gradient`.

        Returns
        -------
        object
            The product as the user gave it.

        Raises
        ------
        ValueError
            If there is no `hessp`.
        """
        if self._hessp is None:
            raise ValueError("this method needs products with the Hessian: give hessp=function(x, direction, *args)")
        return self._hessp(x, direction, *samples, *self._args)


def number_of(value: Any) -> float:
    """The value of a function as a float.

    Parameters
    ----------
    value : object
        A number, or an array of one element.

    Returns
    -------
    float
        A plain Python number, maybe NaN.

    Raises
    ------
    TypeError
        If it is anything else.
    """
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(())[()]
    try:
        return returned(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"fun must return its value as one real number, got {shown(value)}") from None


class Callback:
    """Calls a callback as SciPy does: ``callback(xk)``, or ``callback(intermediate_result=...)``.  Not collective.

    Parameters
    ----------
    function : callable or None
        What a user gave; the name of its only parameter decides.

    Raises
    ------
    TypeError
        If it is not callable.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        if not (function is None or callable(function)):
            raise TypeError(f"callback={shown(function)} must be a function")
        self._function = function
        self._by_keyword = False
        if function is not None:
            try:
                self._by_keyword = set(inspect.signature(function).parameters) == {"intermediate_result"}
            except (TypeError, ValueError):  # of some functions written in C
                self._by_keyword = False

    @property
    def is_given(self) -> bool:
        """Whether there is one."""
        return self._function is not None

    def __call__(self, make: Callable[[], OptimizeResult]) -> bool:
        """Call it after an iteration.

        Parameters
        ----------
        make : callable
            Gives the intermediate result, with a copy of the iterate.

        Returns
        -------
        bool
            Whether to stop: it returned True or raised StopIteration.
        """
        if self._function is None:
            return False
        intermediate = make()
        try:
            if self._by_keyword:
                answer = self._function(intermediate_result=intermediate)
            else:
                answer = self._function(intermediate.x)
        except StopIteration:
            return True
        return isinstance(answer, bool | np.bool) and bool(answer)
