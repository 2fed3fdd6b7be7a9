"""qlog files of QUIC connections, for tools such as qvis. They describe packets and frames without their content."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

from aioquic.quic.logger import QuicLogger, QuicLoggerTrace

_log = logging.getLogger("muxkit.adapters")


class DirectoryLogger(QuicLogger):
    """Writes a file for each connection, with the sizes, numbers and times of packets and frames."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        if not directory.is_dir():
            raise ValueError(f"qlog={os.fspath(directory)!r} is no directory")
        self._directory = directory

    def start_trace(self, is_client: bool, odcid: bytes) -> Trace:
        return Trace(self._directory, is_client=is_client, odcid=odcid)

    def end_trace(self, trace: QuicLoggerTrace) -> None:
        """Do nothing. aioquic calls this for some connections only, and links close their traces themselves."""


class Trace(QuicLoggerTrace):
    """The qlog file of one connection."""

    def __init__(self, directory: Path, *, is_client: bool, odcid: bytes) -> None:
        super().__init__(is_client=is_client, odcid=odcid)
        side = "client" if is_client else "server"
        self._file = (directory / f"{odcid.hex()}_{side}.sqlog").open("w", encoding="utf-8")
        self._pending: list[dict[str, object]] = [
            {
                "qlog_version": "0.3",
                "qlog_format": "JSON-SEQ",
                "trace": {
                    "vantage_point": {"type": side},
                    "common_fields": {"ODCID": odcid.hex(), "time_format": "absolute"},
                },
            }
        ]

    def log_event(self, *, category: str, event: str, data: dict[str, object]) -> None:
        name = f"{category}:{event}"
        self._pending.append({"time": self.encode_time(time.time()), "name": name, "data": data})

    def write(self) -> None:
        """Write the events since the last call. They can't be written earlier, as aioquic completes an event later."""
        pending, self._pending = self._pending, []
        if self._file.closed:
            return
        try:
            self._file.write("".join(f"\x1e{json.dumps(record)}\n" for record in pending))
            self._file.flush()
        except OSError as error:  # a full disk must not end the connection
            # log: A QUIC qlog file couldn't be written. The connection continues.
            _log.warning("%s: %s; the qlog ends here", self._file.name, error.strerror)
            self.close()

    def close(self) -> None:
        """Close the file. Later events are dropped."""
        try:
            self._file.close()
        except OSError as error:
            # log "FILE: ERROR": A qlog file of QUIC could not be closed.
            _log.warning("%s: %s", self._file.name, error.strerror)
