"""Templates, turn ends and formats tell how one model's conversations are written."""
