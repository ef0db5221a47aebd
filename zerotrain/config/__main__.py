"""``python -m zerotrain.config configs/README.md`` writes the reference tables into the file, between its markers."""

from __future__ import annotations

import sys
from pathlib import Path

from zerotrain.config.reference import with_tables

if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_tables(target.read_text(encoding="utf-8")), encoding="utf-8")
