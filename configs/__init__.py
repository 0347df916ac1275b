"""Contains ready-made configs, one per file, for `--config=configs/NAME.py`."""
