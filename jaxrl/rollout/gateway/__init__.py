"""An OpenAI-compatible endpoint before an engine, for agents written for that API."""
