"""The parts of ``sparseconv convert``: what to do, doing it with one model or a folder of them, and telling of it."""
