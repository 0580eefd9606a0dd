"""Runs that outlive the loss of workers."""
