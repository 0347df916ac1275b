"""The experience store keeps groups in a database; they outlive their writer."""
