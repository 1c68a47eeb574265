"""Ling-3 checkpoints of Hugging Face, in and out: `python -m model.hf import|export`."""

from ._errors import CheckpointError as CheckpointError
from ._load import load_hf as load_hf
from ._load import open_hf as open_hf
from ._save import save_hf as save_hf
from ._save import to_checkpoint_tensors as to_checkpoint_tensors
