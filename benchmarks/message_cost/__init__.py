"""What does a streamed message cost? `python -m benchmarks.message_cost`"""
