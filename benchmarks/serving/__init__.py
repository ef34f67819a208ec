"""How does a server do under load? `python -m benchmarks.serving`"""
