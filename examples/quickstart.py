"""Store a prompt's blocks, find them again, read them back."""
