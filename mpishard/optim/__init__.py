"""Update rules, learning-rate schedules and loss scales.  No MPI."""

from mpishard.optim.muon import Muon
from mpishard.optim.rule import ParameterGroup, Rule
from mpishard.optim.rules import LAMB, SGD, Adagrad, Adam, AdamW, Lion, RMSprop

__all__ = ["LAMB", "SGD", "Adagrad", "Adam", "AdamW", "Lion", "Muon", "ParameterGroup", "RMSprop", "Rule"]
