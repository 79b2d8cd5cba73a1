"""PATE with GNMax (Papernot et al. 2018): teachers label public images by noisy votes.

T  teachers, each learnt from its own part of the private records
n  how many teachers vote for each class, on one public image
σ  noise: the answer is the largest of n + σ·N(0, I); a student learns from images and answers

Formal guarantee, for one record added or removed. A record's part follows from this record alone,
so all other parts stay as they are, and with them all teachers but one. On each image that one's
vote moves from one class to another, at most: n changes by (−1, +1), a length of √2. An answer is
thus one Gaussian mechanism of noise multiplier z = σ/√2, Q answers are Q of them, and the student
is post-processing. This holds whatever the votes are. The smaller ε of the papers, which counts
less where teachers agree, tells of private records by itself and is not used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from dp_accounting import GaussianDpEvent
from scipy import sparse

from dpspan.accounting.ledger import Ledger
from dpspan.support.secure import SecureGenerator

Array = np.ndarray[Any, Any]
SENSITIVITY = 2**0.5  # of the votes on one image
PENALTIES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
TEACHERS_AT_ONCE = 200
NEIGHBOURS, ROUNDS = 8, 60


def parts_of(prints: Sequence[bytes], teachers: int, seed: int) -> Array:
    """The teacher of each record, by its fingerprint: it depends on no other record."""
    key = f"part {seed}".encode()
    hashes = (hashlib.blake2b(each, digest_size=8, key=key).digest() for each in prints)
    return np.array([int.from_bytes(each) % teachers for each in hashes], dtype=np.int64)


def learn_teachers(x: Array, y: Array, parts: Array, teachers: int, classes: int) -> Array:
    """(teachers, features, classes): weights of linear teachers, each of its own part alone.

    One whose part is empty has no weights and votes for the first class.
    """
    learnt = np.zeros((teachers, x.shape[1], classes), dtype=np.float32)
    for each in range(teachers):
        part = np.flatnonzero(parts == each)
        if len(part):
            learnt[each] = Ridge(x[part]).learn(one_hot(y[part], classes))
    return learnt


def count_votes(teachers: Array, images: Array) -> Array:
    """(images, classes): how many teachers take an image for a class. Not private."""
    classes = teachers.shape[2]
    counts = np.zeros((len(images), classes), dtype=np.int64)
    for start in range(0, len(teachers), TEACHERS_AT_ONCE):
        some = teachers[start : start + TEACHERS_AT_ONCE]
        side_by_side = some.transpose(1, 0, 2).reshape(some.shape[1], -1)
        voted = (images @ side_by_side).reshape(len(images), len(some), classes).argmax(2)
        counts += np.stack([(voted == each).sum(1) for each in range(classes)], axis=1)
    return counts


def answer(votes: Array, noise_multiplier: float, ledger: Ledger, noise: SecureGenerator) -> Array:
    """A class for each image, released: the ledger is charged for every one of them first."""
    ledger.charge(GaussianDpEvent(noise_multiplier), len(votes))
    answers: Array = with_noise(votes, noise_multiplier, noise).argmax(1)
    return answers


def with_noise(votes: Array, noise_multiplier: float, noise: SecureGenerator) -> Array:
    """Each number of votes with σ·N(0, 1)."""
    sigma = SENSITIVITY * noise_multiplier
    noisy: Array = votes + sigma * noise.standard_normal(votes.shape)
    return noisy


class Student:
    """What a student knows besides answers: public images, and which of them look alike."""

    def __init__(self, images: Array, looks: Array) -> None:
        self._images, self._similar = images, similarity(looks)
        self._rows: dict[int, Ridge] = {}

    def learn(self, answers: Array, classes: int, *, passed_on: float) -> Array:
        """(features, classes) from answers to the first images.

        They are passed on to images that look alike (label spreading, Zhou et al. 2004), so that
        all are learnt from; or not, with 0, and it learns from those that were answered.
        """
        told = one_hot(answers, classes)
        if passed_on:
            labels = spread_labels(self._similar, told, passed_on).argmax(1)
            told = one_hot(labels, classes)
        count = len(told)
        if count not in self._rows:
            self._rows[count] = Ridge(self._images[:count])
        return self._rows[count].learn(told)


def similarity(images: Array) -> sparse.csr_matrix:
    """Each image joined to the nearest ones by their cosine, squared; symmetric, normalised."""
    cosine = images @ images.T
    np.fill_diagonal(cosine, -np.inf)
    count = min(NEIGHBOURS, len(images) - 1)
    nearest = np.argpartition(-cosine, count - 1, axis=1)[:, :count]
    weights = np.maximum(np.take_along_axis(cosine, nearest, 1), 0) ** 2
    rows = np.repeat(np.arange(len(images)), count)
    joined = sparse.csr_matrix((weights.ravel(), (rows, nearest.ravel())), shape=cosine.shape)
    joined = joined.maximum(joined.T)
    scale = sparse.diags(1 / np.sqrt(np.asarray(joined.sum(1)).ravel() + 1e-9))
    return sparse.csr_matrix(scale @ joined @ scale)


def spread_labels(similar: sparse.csr_matrix, told: Array, passed_on: float) -> Array:
    """Scores for all images from labels of the first ones."""
    begun = np.zeros((similar.shape[0], told.shape[1]))
    begun[: len(told)] = told - 1 / told.shape[1]
    scores = begun
    for _ in range(ROUNDS):
        scores = passed_on * (similar @ scores) + (1 - passed_on) * begun
    return scores


def one_hot(labels: Array, classes: int) -> Array:
    """float32, as features are."""
    return np.eye(classes, dtype=np.float32)[labels]


class Ridge:
    """Ridge regression without an intercept, its penalty that of the least error left out by one.

    The penalty is chosen by these very rows: a teacher's by its own records.
    """

    def __init__(self, x: Array) -> None:
        few = len(x) < x.shape[1]  # by the smaller of the two Gram matrices
        values, vectors = np.linalg.eigh(x @ x.T if few else x.T @ x)
        kept = values > 1e-5 * values[-1]
        self._squares, vectors = values[kept], vectors[:, kept]
        lengths = np.sqrt(self._squares)
        self._left = vectors if few else x @ vectors / lengths
        self._right = x.T @ vectors / lengths if few else vectors

    def learn(self, told: Array) -> Array:
        """(features, classes) for targets of 0 and 1."""
        targets = told - 1 / told.shape[1]
        turned = self._left.T @ targets
        penalty = min(PENALTIES, key=lambda each: self._left_out(each, turned, targets))
        scale = np.sqrt(self._squares) / (self._squares + penalty)
        weights: Array = self._right @ (scale[:, None] * turned)
        return weights.astype(np.float32)

    def _left_out(self, penalty: float, turned: Array, targets: Array) -> float:
        """The squared error of each row by all others."""
        kept = self._squares / (self._squares + penalty)
        error = targets - self._left @ (kept[:, None] * turned)
        leverage = (self._left**2) @ kept
        return float(((error / (1 - leverage)[:, None]) ** 2).sum())
