"""8-bit communication with error feedback, in NumPy.

Written from its description in the docstrings, not from the package's code.
"""

import numpy as np

BLOCK = 256


def row_size(num_numbers):
    """Numbers of a row, padded to whole blocks of a multiple of four."""
    in_words = max(4, -(-num_numbers // 4) * 4)
    block = min(BLOCK, in_words)
    return -(-in_words // block) * block, block


def as_received(row, block):
    """A float32 row after it was quantized."""
    out = np.empty_like(row)
    for begin in range(0, len(row), block):
        x = row[begin : begin + block]
        scale = np.float32(np.abs(x).max()) / np.float32(127)
        with np.errstate(invalid="ignore"):
            ratio = x * (np.float32(1) / scale if scale else np.float32(0))
        integers = np.clip(np.rint(ratio), -127, 127).astype("float32")
        out[begin : begin + block] = integers * scale
        if not np.isfinite(x).all():
            out[begin : begin + block] = np.nan
    return out


def scattered(sent):
    """Sums of rows and what is lost; `sent[replica]` is [group_size, size]."""
    group_size, size = sent[0].shape
    padded_size, block = row_size(size)
    rows = np.zeros([len(sent), group_size, padded_size], "float32")
    rows[:, :, :size] = sent
    seen = np.stack(
        [[as_received(row, block) for row in replica] for replica in rows]
    )
    sums = seen.astype("float64").sum(0).astype("float32")
    return sums[:, :size], (rows - seen)[:, :, :size]


def summed(sent):
    """The group's sum of vectors, and what each replica loses."""
    group_size, size = len(sent), len(sent[0])
    padded_size, block = row_size(-(-size // group_size))
    rows = np.zeros([group_size, group_size * padded_size], "float32")
    rows[:, :size] = sent
    sums, lost = scattered(rows.reshape(group_size, group_size, padded_size))
    total = np.stack([as_received(row, block) for row in sums])
    for position in range(group_size):
        lost[position, position] += (sums - total)[position]
    return total.reshape(-1)[:size], lost.reshape(group_size, -1)[:, :size]


class Training:
    """SGD with rate 1 on sums over a group.

    Args:
      shapes: The variables' shapes, in the order of the optimizer.
      feedback: How often a replica's loss is added to its next gradient: 1; 0
        and 2 are mutants.
      sharded: Whether each replica updates a shard.
      packs: Positions of variables that are quantized together; by default all.
    """

    def __init__(
        self, shapes, group_size, feedback=1, sharded=False, packs=None
    ):
        self._shapes, self._size = shapes, group_size
        self._feedback, self._sharded = feedback, sharded
        self._packs = packs or []
        self._parts = [
            Training([shapes[i] for i in pack], group_size, feedback, sharded)
            for pack in self._packs
        ]
        self.weights = [np.zeros(s, "float32") for s in shapes]
        self.residuals = [
            [np.zeros(s, "float32") for s in shapes] for _ in range(group_size)
        ]

    def step(self, gradients):
        """`gradients[replica][variable]`."""
        for pack, part in zip(self._packs, self._parts, strict=True):
            part.step(
                [[of_replica[i] for i in pack] for of_replica in gradients]
            )
            for at, i in enumerate(pack):
                self.weights[i] = part.weights[at]
                for mine, theirs in zip(
                    self.residuals, part.residuals, strict=True
                ):
                    mine[i] = theirs[at]
        if self._parts:
            return
        feedback = np.float32(self._feedback)
        fed = [
            [g + feedback * r for g, r in zip(gs, rs, strict=True)]
            for gs, rs in zip(gradients, self.residuals, strict=True)
        ]
        combine = self._scattered if self._sharded else self._summed
        totals, lost = combine(fed)
        for weight, total in zip(self.weights, totals, strict=True):
            weight -= total
        if self._feedback:
            self.residuals = lost

    def _summed(self, fed):
        # The last variables come first.
        total, lost = summed(
            np.stack(
                [np.concatenate([g.ravel() for g in gs[::-1]]) for gs in fed]
            )
        )
        return self._unpacked(total), [self._unpacked(one) for one in lost]

    def _unpacked(self, vector):
        sizes = [int(np.prod(s)) for s in self._shapes[::-1]]
        parts = np.split(vector, np.cumsum(sizes)[:-1])
        return [
            part.reshape(shape)
            for part, shape in zip(parts, self._shapes[::-1], strict=True)
        ][::-1]

    def _scattered(self, fed):
        sums, lost = scattered(
            np.stack(
                [
                    np.concatenate([self._rows(g) for g in gs[::-1]], 1)
                    for gs in fed
                ]
            )
        )
        return self._joined(sums), [self._joined(one) for one in lost]

    def _rows(self, gradient):
        size = max(1, -(-gradient.size // self._size))
        flat = np.zeros(size * self._size, "float32")
        flat[: gradient.size] = gradient.ravel()
        return flat.reshape(self._size, size)

    def _joined(self, rows):
        sizes = [
            max(1, -(-int(np.prod(s)) // self._size))
            for s in self._shapes[::-1]
        ]
        parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1)
        return [
            part.ravel()[: int(np.prod(shape))].reshape(shape)
            for part, shape in zip(parts, self._shapes[::-1], strict=True)
        ][::-1]
