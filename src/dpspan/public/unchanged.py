"""Whether a dataset is still the one that was compared with public data.

To compare is to read every record, so the outcome is worth remembering; but a dataset that has
changed must never pass for the one that was compared. Tensors can be written to without a trace,
and a dataset of somebody's own may read anything anywhere: those are compared every time. So are
records that code or other files take part in making: a transform, a collate_fn, images by path.

What is left are memory-mapped Arrow files of the library `datasets`, which are written once. They
are known by the library's fingerprint (schema, order, every step since), by the order itself where
one is held in memory, and by what the file system says of each file: device, inode, size, and when
content and inode last changed. A file changed in the last seconds could change again under the same
times, and is not trusted yet.

A hash of that is kept with the public data, in memory, and only if no copy was found. No digest of
a private record is kept anywhere: on a disk, it would tell whoever guesses a record that it is one.
"""

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, default_collate

_SETTLED = 2 * 10**9  # ns; the coarsest clock of a common file system


def stamp(private: DataLoader[Any]) -> bytes | None:
    """Differs whenever the records do; None where that cannot be told."""
    library: Any = sys.modules.get("datasets")
    dataset: Any = private.dataset
    known = type(dataset) is getattr(library, "Dataset", None)
    if not known or private.collate_fn is not default_collate:
        return None
    try:
        blocks = getattr(dataset._data, "blocks", [[dataset._data]])
        mapped = all(type(x) is library.table.MemoryMappedTable for row in blocks for x in row)
        decoded = any(dataset.features._column_requires_decoding.values())
        if not mapped or decoded or dataset.format["type"] == "custom":
            return None
        files = [Path(each["filename"]).stat() for each in dataset.cache_files]
        if max(max(f.st_mtime_ns, f.st_ctime_ns) for f in files) > time.time_ns() - _SETTLED:
            return None
        facts = [(f.st_dev, f.st_ino, f.st_size, f.st_mtime_ns, f.st_ctime_ns) for f in files]
        whole = hashlib.blake2b(repr((dataset._fingerprint, dataset.format, facts)).encode())
        if dataset._indices is not None:
            whole.update(dataset._indices.column(0).to_numpy())
    except (AttributeError, OSError):  # another version of the library; a file that is gone
        return None
    return whole.digest()
