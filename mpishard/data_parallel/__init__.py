"""Optimizers that distribute an update rule over the data axis: DDP, ZeRO, local SGD.

========================  ============================================================================================
what users call           ``sharded_optimizer``, the base; ``optimizers``, those by name; ``local_sgd``; ``models``;
                          ``results``: what `optimize` returns
settings                  ``configuration``; ``settings``: as text by name, and that all ranks have the same;
                          ``validation``: checks on a rank
who sums what             ``strategies`` choose a ``summation``; ``configuration``: what is summed at once
who updates what          ``strategies`` decide; ``ownership`` has what follows, and copies on ranks of one model
a step                    ``sharded_optimizer``; ``gradient_norm``: clipping's, and NaN; ``update``, also by a
                          method, with the norms of LAMB; ``matrices``: those that Muon needs whole
methods                   ``method_state``: a minimisation as state of an optimizer
the state                 ``optimizer_state``: what loops, elastic runs and checkpoints need, and of which
                          parameters; ``rank_state``: the arrays of one rank, with layouts; ``results``: the numbers;
                          ``full_state``: as one value for any layout; ``serialization``: as bytes
state of Local SGD        ``local_sgd``: the averages and the steps in between
========================  ============================================================================================
"""
