"""Models: one transformer, a `FamilySpec` per family, and Hugging Face folders."""
