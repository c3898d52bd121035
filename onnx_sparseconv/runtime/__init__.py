"""Running models: sessions with the custom-op library, comparing two models, timing them, looking at the installation.

Nothing is imported here, so that the modules which need no onnxruntime stay usable without it.
"""
