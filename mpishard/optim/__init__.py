"""Update rules, learning-rate schedules and loss scales.  No MPI.

Input: a gradient, a parameter, its state and the number of the step.
Output: the new parameter and state, element by element in one compiled pass, or matrix by matrix.

Read ``rule`` first, then ``rules`` with their ``formulas``, and ``muon``, whose steps need whole matrices;
``lr_schedules`` and ``loss_scale`` last.
"""

from mpishard.optim.muon import Muon
from mpishard.optim.rule import ParameterGroup, Rule
from mpishard.optim.rules import LAMB, SGD, Adagrad, Adam, AdamW, Lion, RMSprop

__all__ = ["LAMB", "SGD", "Adagrad", "Adam", "AdamW", "Lion", "Muon", "ParameterGroup", "RMSprop", "Rule"]
