"""Puts this folder on the import path: the targets are a package of their own, also run by run.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
