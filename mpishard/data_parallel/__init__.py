"""Optimizers that distribute an update rule over the data axis: DDP, ZeRO, local SGD.

Input: a rule or a method, a mesh or a configuration, and at each step flat parameters and this rank's gradients.
Output: updated parameters on all ranks that need them, and a state that any layout can load.

Read ``sharded_optimizer`` first; then what its step calls, in this order: ``rule_state``, ``summation``,
``gradient_norm``, ``update``, ``strategies``; then ``optimizer_state``.  By subject:

========================  ============================================================================================
what users call           ``sharded_optimizer``, the base; ``optimizers``, those by name; ``local_sgd``; ``models``;
                          ``results``: what `optimize` returns
settings                  ``configuration``; ``settings``: as text by name, and that all ranks have the same;
                          ``validation``: checks on a rank; ``arithmetic``: what else bits depend on
gradient reduction        ``strategies``: which ``summation``; ``configuration``: the size of buckets
division of the state     ``strategies``: which; ``ownership``: the ranges of a rank, and copies on ranks of one model
a step                    ``sharded_optimizer``: checks its arguments; ``rule_state``: takes it by a rule;
                          ``gradient_norm``: looks for NaN, and measures the norm for clipping; ``update``: applies the
                          rule; ``rank_state``: gathers tensors that a rule needs whole; ``method_state``: takes it by
                          a method, as an evaluation of its line search
the state                 ``optimizer_state``: creates, binds, saves, restores and rebuilds it, for rules and methods;
                          ``rank_state``: the numbers, and the arrays of one rank with their layouts;
                          ``auxiliary_state``: what it has besides the state of a rule; ``full_state``: full tensors
                          as one value for any layout, and as bytes
Local SGD                 ``local_sgd``: its state; ``local_averages``: the averages and the steps in between
========================  ============================================================================================
"""
