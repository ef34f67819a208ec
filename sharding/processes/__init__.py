"""Jobs of several processes, on JAX's own distributed runtime."""

from sharding.processes.job import Facts, FollowingJob, Job, JobLostError, LeadingJob
from sharding.processes.joining import current_job, join, smallest_of_all
from sharding.processes.place import ProcessPlace, find_place

__all__ = [
    "Facts",
    "FollowingJob",
    "Job",
    "JobLostError",
    "LeadingJob",
    "ProcessPlace",
    "current_job",
    "find_place",
    "join",
    "smallest_of_all",
]
