"""The Tinker API: many users train adapters of one model, over HTTP."""
