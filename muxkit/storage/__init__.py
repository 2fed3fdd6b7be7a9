"""Durable storage for protocols and the pipeline: SQLite files, PostgreSQL databases, their threads and their errors.

This package knows nothing about the data that it stores. A store describes its tables with a `Schema`, and passes its
units of work to a backend as functions. The backend calls these functions, with the rows as the argument, in a thread
of its own.
"""

from muxkit.runtime import protect_package
from muxkit.storage.errors import StoreClosed as StoreClosed
from muxkit.storage.errors import StoreCorrupt as StoreCorrupt
from muxkit.storage.errors import StoreError as StoreError
from muxkit.storage.errors import StoreFailed as StoreFailed
from muxkit.storage.errors import StoreFull as StoreFull
from muxkit.storage.errors import StoreLocked as StoreLocked
from muxkit.storage.errors import StoreReadOnly as StoreReadOnly
from muxkit.storage.errors import StoreVersion as StoreVersion
from muxkit.storage.schema import KINDS as KINDS
from muxkit.storage.schema import Kind as Kind
from muxkit.storage.schema import Schema as Schema
from muxkit.storage.schema import kind_of as kind_of
from muxkit.storage.worker import Job as Job
from muxkit.storage.worker import Waiters as Waiters
from muxkit.storage.worker import Watch as Watch
from muxkit.storage.worker import Worker as Worker
from muxkit.storage.worker import fail_jobs as fail_jobs

protect_package(__name__)

__all__ = [
    "KINDS",
    "Job",
    "Kind",
    "Schema",
    "StoreClosed",
    "StoreCorrupt",
    "StoreError",
    "StoreFailed",
    "StoreFull",
    "StoreLocked",
    "StoreReadOnly",
    "StoreVersion",
    "Waiters",
    "Watch",
    "Worker",
    "fail_jobs",
    "kind_of",
]
