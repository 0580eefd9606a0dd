"""Update rules, learning-rate schedules and loss scales.  No MPI."""

from mpishard.optim.rules import LAMB, SGD, Adagrad, Adam, AdamW, Lion, RMSprop, Rule

__all__ = ["LAMB", "SGD", "Adagrad", "Adam", "AdamW", "Lion", "RMSprop", "Rule"]
