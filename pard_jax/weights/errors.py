"""What can be wrong with a checkpoint: it is not there, it is damaged, or it is not the model its config describes."""

from __future__ import annotations


class CheckpointNotFoundError(FileNotFoundError):
    """No checkpoint by that name: no such directory, no such repository, or no network and nothing cached."""


class CheckpointError(ValueError):
    """A file of the checkpoint is damaged, or holds what cannot be loaded. The message names the file."""


class CheckpointMismatchError(CheckpointError):
    """The tensors are not those of the config. The message counts those that are missing, unexpected, of another
    shape or of a dtype that is not supported, and lists the first."""
