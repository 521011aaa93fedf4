"""Documents that are packed into samples, one after another: where each begins, and who sees whom.

Positions restart at 0 in each document, so one array says where all of them are:

    tokens        the cat sat . a dog . so it goes
    position_ids  0   1   2   3 0 1   2 0  1  2

A token sees the tokens of its own document, up to itself. Nothing else in a model mixes tokens.
"""

from contextlib import AbstractContextManager
from typing import TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from minipar.autograd import modes
from minipar.autograd.checks import check_packed_shape, check_position_ids
from minipar.backend import Array, from_host, setting, xp

Document: TypeAlias = tuple[slice, slice]  # its sample, and its tokens in the sample


def packed(position_ids: Array | None) -> AbstractContextManager[np.ndarray | None]:
    """Let samples hold several documents in forward passes inside the `with` block.

        with packed(position_ids):
            loss = model.loss_sum(x, y)
        loss.backward()

    position_ids (B, T) are integers: each token's position in its document. Each is 0, where a
    document begins, or one more than the one before it. They are those of whole samples, also where
    a rank has a part of each sample. None: a sample is one document. Ignore (-100) the target of a
    document's last token; it is another document's first. UsageError for other ids.

    NB: with the same position_ids, transformers keeps documents apart in FlashAttention, whose
    cu_seqlens are the places of the zeros. Of lengths n they are
    np.concatenate([np.arange(n) for n in lengths])[None].
    """
    if position_ids is None:
        return setting(modes.position_ids, None)
    ids = np.asarray(position_ids)  # on the host: they decide what is computed
    check_position_ids(ids)
    return setting(modes.position_ids, ids.astype(np.int64))


def packed_ids(length: int, samples: int | None = None) -> np.ndarray | None:
    """Return the position ids (B, T) of samples of this `length`; None if they are not packed.

    UsageError if they are of samples of another length, or of another number of samples.
    """
    ids = modes.position_ids.get()
    if ids is not None:
        check_packed_shape(ids, length, samples)
    return ids


def documents_of(position_ids: np.ndarray) -> list[Document]:
    """List the documents of all samples, from the first to the last."""
    documents = []
    length = position_ids.shape[1]
    for i, ids in enumerate(position_ids):
        starts = np.flatnonzero(ids == 0).tolist()
        ends = [*starts[1:], length]
        for start, end in zip(starts, ends, strict=True):
            documents.append((slice(i, i + 1), slice(start, end)))
    return documents


def other_documents(position_ids: np.ndarray, dtype: DTypeLike) -> Array:
    """Return what to add to scores so that no token sees an earlier document: -inf there, else 0.

    (B, T) -> (B, 1, 1, T, T).
    """
    tokens = np.arange(position_ids.shape[1])
    starts = tokens - position_ids  # (B, T): where each token's document begins
    is_earlier = from_host(tokens < starts[..., None])  # (B, T, T)
    mask = xp.where(is_earlier, -xp.inf, 0).astype(dtype)
    return mask[:, None, None]
