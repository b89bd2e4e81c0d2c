"""Training jobs for RQ: a small digit classifier on generated data, and the ways in which training goes wrong."""

from __future__ import annotations

import os
import random
import signal
import time

#: Seven segments of a digit, as on a clock: which of them are lit.
SEGMENTS = (
    "1110111",
    "0010010",
    "1011101",
    "1011011",
    "0111010",
    "1101011",
    "1101111",
    "1010010",
    "1111111",
    "1111011",
)


def sample(digit: int, noise: float, source: random.Random) -> list[float]:
    """A digit as seven noisy brightnesses, and a constant."""
    return [float(lit) + source.gauss(0, noise) for lit in SEGMENTS[digit]] + [1.0]


def train(run: str, *, epochs: int = 8, noise: float = 0.15, rate: float = 0.1) -> float:
    """Train a perceptron per digit; returns the accuracy on digits it has not seen."""
    if not 0 < rate <= 1:
        raise ValueError(f"learning rate {rate} makes no sense")
    source = random.Random(run)
    weights = [[0.0] * 8 for _ in SEGMENTS]
    for _ in range(epochs):
        for digit in source.choices(range(10), k=300):
            seen = sample(digit, noise, source)
            guess = predict(weights, seen)
            if guess != digit:
                for place, brightness in enumerate(seen):
                    weights[digit][place] += rate * brightness
                    weights[guess][place] -= rate * brightness
    tests = source.choices(range(10), k=500)
    return sum(predict(weights, sample(digit, noise, source)) == digit for digit in tests) / len(tests)


def predict(weights: list[list[float]], seen: list[float]) -> int:
    scores = [sum(a * b for a, b in zip(row, seen, strict=True)) for row in weights]
    return scores.index(max(scores))


def train_for_ever(run: str) -> None:
    """A learning rate so small that it never arrives. Two minutes count as for ever: nothing shall outlive the example."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        train(run, epochs=1, rate=1e-9)
        time.sleep(0.05)


def train_until_killed(run: str) -> None:
    """The kernel's answer to a batch that does not fit into memory."""
    train(run, epochs=1)
    os.kill(os.getpid(), signal.SIGKILL)
