"""Connector parts that do not depend on the engine: a scheduler that decides, and workers that move the bytes."""
