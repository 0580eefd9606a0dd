"""Optimizers that distribute an update rule over the data axis: DDP, ZeRO, local SGD.

========================  ============================================================================================
what users call           ``sharded_optimizer``, the base; ``optimizers``, those by name; ``local_sgd``; ``models``;
                          ``results``: what `optimize` returns
settings                  ``configuration``; ``settings``: as text by name; ``validation``: checks on a rank
agreement of ranks        ``agreement``: all must have the same arguments and settings
who sums what             ``strategy`` and ``strategies``; ``configuration``: what is summed at once, and its bytes
who updates what          ``strategy`` decides; ``owned_ranges``, and ``owned_parts``: these cut at tensors
ranks of one model        ``tensor_copies``: copies on several of them; ``full_state``: whole tensors from parts
a step                    ``step_arguments``, ``gradient_norm``: clipping's, and NaN; ``update``, with the norms
                          of LAMB
methods                   ``method_state``: a minimisation as state of an optimizer; ``method_update``: its step;
                          ``sharded_space``: its vectors; ``method_limits``: bounds; ``method_evaluations``
the state                 ``optimizer_state``: what loops, elastic runs and checkpoints need, and of which
                          parameters; ``rank_state``, ``slots``: the arrays of one rank; ``results``: the numbers
the state, elsewhere      ``state_shards``: with its layouts, to be saved or moved; ``full_state``: as one value for any
                          layout; ``serialization``: as bytes
state of Local SGD        ``local_sgd``: the averages and the steps in between
========================  ============================================================================================
"""
