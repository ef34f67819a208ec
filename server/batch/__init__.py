"""`jaxserve batch`: a file of requests, answered as fast as the engine can, in OpenAI's batch format."""

from server.batch.files import BatchFiles
from server.batch.manifest import KeptManifest
from server.batch.requests import Preparer
from server.batch.run import BatchReport, BatchRun

__all__ = ["BatchFiles", "BatchReport", "BatchRun", "KeptManifest", "Preparer"]
