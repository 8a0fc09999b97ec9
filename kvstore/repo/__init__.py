"""The protocol of docs/ordering.md: sessions on a bare bucket, with no database, no lease, and no clock in any safety argument."""

from kvstore.repo.blocks import BlockWant, BucketOrigin, want
from kvstore.repo.chains import Source
from kvstore.repo.commit import Proposal
from kvstore.repo.repository import Repo, RepoSettings
from kvstore.repo.sessions import Sessions

__all__ = ["BlockWant", "BucketOrigin", "Proposal", "Repo", "RepoSettings", "Sessions", "Source", "want"]
