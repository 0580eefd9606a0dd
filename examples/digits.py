"""mpirun -n 4 python examples/digits.py

The smallest complete script: softmax regression on the handwritten digits that scikit-learn ships.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

import mpishard

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("the digits come with scikit-learn: pip install scikit-learn")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default 300)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    x = np.hstack([images / 16, np.ones((len(images), 1))])  # a column of ones for the bias
    test = np.random.default_rng(0).permutation(len(x)) < 360  # the same on every rank
    x_train, labels_train, x_test, labels_test = x[~test], labels[~test], x[test], labels[test]
    start = np.zeros(x.shape[1] * 10)

    def loss_and_gradient(parameters: np.ndarray, samples: np.ndarray, gradient: np.ndarray) -> float:
        """Summed cross-entropy of the samples; adds its gradient to `gradient`."""
        rows, truth = x_train[samples], labels_train[samples]
        scores = rows @ parameters.reshape(-1, 10)
        scores -= scores.max(axis=1, keepdims=True)
        probabilities = np.exp(scores)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        chosen = np.arange(len(samples)), truth
        loss = -float(np.log(probabilities[chosen]).sum())
        probabilities[chosen] -= 1
        gradient += (rows.T @ probabilities).ravel()
        return loss

    with mpishard.Mesh() as mesh:
        optimizer = mpishard.as_distributed(mpishard.AdamW(lr=0.02), mesh)
        problem = mpishard.OptimizationProblem(
            loss_and_gradient, start, samples=len(x_train), batch_size=128, steps=options.steps, seed=options.seed
        )
        result = optimizer.optimize(problem)
        accuracy = np.mean((x_test @ result.parameters.reshape(-1, 10)).argmax(axis=1) == labels_test)
        passed = accuracy > 0.93
        if mesh.rank == 0:
            print(f"{'PASS' if passed else 'FAIL'}: {accuracy:.1%} of the test digits are read right; wanted: over 93%")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
