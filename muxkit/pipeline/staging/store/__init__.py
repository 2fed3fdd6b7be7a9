"""Staging stores: transactions until they are committed, and the streams that they become."""

from muxkit.pipeline.staging.store.open import open_staging as open_staging
from muxkit.pipeline.staging.store.rows import LAST_BATCH as LAST_BATCH
from muxkit.pipeline.staging.store.rows import LONGEST_NAME as LONGEST_NAME
from muxkit.pipeline.staging.store.rows import Block as Block
from muxkit.pipeline.staging.store.rows import Encoding as Encoding
from muxkit.pipeline.staging.store.rows import Key as Key
from muxkit.pipeline.staging.store.rows import StagingLimits as StagingLimits
from muxkit.pipeline.staging.store.rules import BatchProgress as BatchProgress
from muxkit.pipeline.staging.store.rules import Commit as Commit
from muxkit.pipeline.staging.store.rules import Published as Published
from muxkit.pipeline.staging.store.rules import rows_of as rows_of
from muxkit.pipeline.staging.store.store import Staging as Staging
