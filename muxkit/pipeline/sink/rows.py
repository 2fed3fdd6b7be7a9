"""Blocks of rows from record batches: the bytes of a column as they lie in memory, or each row as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import msgspec
import numpy as np
import pyarrow as pa

from muxkit.pipeline.errors import OptionError, PipelineError
from muxkit.pipeline.options import RowEncoding
from muxkit.pipeline.staging.records import Block, Encoding, make_block

if TYPE_CHECKING:
    from collections.abc import Iterator

VALUE: Final = "value"
LENGTH: Final = np.dtype("<u4")


def encoding_of(columns: dict[str, str], wanted: RowEncoding) -> Encoding:
    """Choose the encoding of rows; `columns` maps names to the simple names of their types in Spark."""
    alone = len(columns) == 1 and columns.get(VALUE) in ("string", "binary")
    if wanted is RowEncoding.JSON or (wanted is RowEncoding.AUTO and not alone):
        return Encoding.JSON
    if not alone:
        told = ", ".join(f"{name} {kind}" for name, kind in columns.items())
        raise OptionError(
            "encoding",
            f"value needs one column, value, of strings or bytes, and there are: {told}; use json, or select",
        )
    return Encoding.TEXT if columns[VALUE] == "string" else Encoding.BINARY


class Blocks:
    """Makes blocks of about `size` bytes from the rows of one transaction."""

    def __init__(self, encoding: Encoding, size: int) -> None:
        self.rows = 0
        self._size = size
        self._encode = msgspec.json.Encoder().encode
        self._make = self._json if encoding is Encoding.JSON else self._values

    def of(self, batch: pa.RecordBatch) -> list[Block]:
        """Make the blocks of the next rows."""
        return list(self._make(batch))

    def _json(self, batch: pa.RecordBatch) -> Iterator[Block]:
        rows: list[bytes] = []
        encode, size = self._encode, 0
        for row in batch.to_pylist():
            try:
                encoded = encode(row)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                raise PipelineError(
                    f"row {self.rows + len(rows)} of this partition cannot be written as JSON (option encoding): "
                    f"{error}"
                ) from error
            rows.append(encoded)
            size += len(encoded)
            if size >= self._size:
                yield self._counted(make_block(self.rows, rows))
                rows, size = [], 0
        if rows:
            yield self._counted(make_block(self.rows, rows))

    def _values(self, batch: pa.RecordBatch) -> Iterator[Block]:
        column: Any = batch.column(VALUE)
        if column.null_count:
            row = self.rows + column.is_null().to_pylist().index(True)
            raise PipelineError(f"row {row} of this partition is null in the column value; filter such rows out")
        if not len(column):
            return
        # With 64-bit offsets in any case; the cast does not copy the bytes.
        column = column.cast(pa.large_binary())
        _, starts, data = column.buffers()
        offsets = np.frombuffer(starts, np.int64)[column.offset : column.offset + len(column) + 1]
        content = memoryview(data) if data is not None else memoryview(b"")
        lengths = np.diff(offsets).astype(LENGTH)
        first = 0
        while first < len(lengths):
            end = int(np.searchsorted(offsets, offsets[first] + self._size, "right")) - 1
            end = max(end, first + 1)
            body = lengths[first:end].tobytes() + bytes(content[offsets[first] : offsets[end]])
            yield self._counted(Block(self.rows, end - first, crc32(body), body))
            first = end

    def _counted(self, block: Block) -> Block:
        self.rows += block.rows
        return block
