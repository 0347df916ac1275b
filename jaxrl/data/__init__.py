"""Data: datasets, chat tokenization, samplers, dumps and the experience store."""
